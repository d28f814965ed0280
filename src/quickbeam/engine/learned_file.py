"""What was learned of a drafter, in a file from one process to the next.

It holds changes of weights and no text. It is written under another name first: what a killed
process leaves is a whole file or none that is read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quickbeam.drafters.learning import Changes, LowRank
from quickbeam.drafters.texts import tenant_name, tenant_of_name
from quickbeam.engine.kept_prefixes import checksum_of

logger = logging.getLogger(__name__)
SUFFIX = ".learned"


class LearnedFile:
    """The file at `path`. `identity`: of the model and its drafter; others' files are not read."""

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity

    def read(self) -> dict[Hashable, list[Changes]]:
        """Return the versions of each tenant's changes, those in use last.

        Returns nothing where there is no file, where it is damaged, which a warning says, and where
        it is of another model or drafter.
        """
        try:
            with safe_open(self._path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if metadata.get("identity") != self._identity:
                logger.warning("%s is of another model or drafter: it is ignored", self._path)
                return {}
            if metadata.get("checksum") != checksum_of(metadata["tenants"], tensors):
                raise ValueError("its content is not what was written")
            names = json.loads(metadata["tenants"])
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            logger.warning("what was learned is ignored: %s is damaged (%s)", self._path, error)
            return {}
        versions: dict[Hashable, list[Changes]] = {}
        for key in sorted(tensors):
            tenant_number, version, name, side = key.split("/")
            if side != "up":
                continue
            change = LowRank(tensors[key], tensors[f"{tenant_number}/{version}/{name}/down"])
            of_tenant = versions.setdefault(tenant_of_name(names[int(tenant_number)]), [])
            if len(of_tenant) == int(version):
                of_tenant.append({})
            of_tenant[int(version)][name] = change
        return versions

    def write(self, versions: Mapping[Hashable, Sequence[Changes]]) -> None:
        """Write the versions of each tenant's changes; where that fails, say so in a warning."""
        tensors = dict[str, torch.Tensor]()
        for tenant_number, of_tenant in enumerate(versions.values()):
            for version, changes in enumerate(of_tenant):
                for name, change in changes.items():
                    for side, matrix in change._asdict().items():
                        tensors[f"{tenant_number}/{version}/{name}/{side}"] = matrix
        names = json.dumps([tenant_name(tenant) for tenant in versions])
        metadata = {
            "identity": self._identity,
            "tenants": names,
            "checksum": checksum_of(names, tensors),
        }
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(save(tensors, metadata))
            os.replace(part, self._path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            logger.warning("what was learned is not kept: %s", error)
