"""Draws the pictures of the page for the docs, from the real server with the embedded model: python
tests/page_shots.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from page_server import chromium, serving
from quickbeam import LLM
from quickbeam.serve.app import create_app
from quickbeam.serve.runner import Runner
from quickbeam.serve.settings import ServeSettings

FOLDER = Path(__file__).parents[1] / "docs" / "images"
QUESTION = "Write a short poem about the sea."
SETTINGS = {"max_tokens": 88, "budget": 12}  # trees of one size, whatever the machine is busy with


def draw(browser: Any, address: str) -> None:
    """One answer, in both schemes."""
    page = browser.new_page(viewport={"width": 1280, "height": 910}, device_scale_factor=1.4)
    page.set_default_timeout(120_000)
    page.goto(address)
    page.click("#open-settings")
    for name, value in SETTINGS.items():
        page.fill(f"#{name}", str(value))
    page.keyboard.press("Enter")
    page.check("#beside")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.locator(".verdict.same").wait_for()
    page.locator("#timeline [role=option]").nth(
        telling(page.evaluate("turns[0].answer.steps"))
    ).click()
    page.focus("#prompt")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(300)  # colours of controls fade
        page.screenshot(path=FOLDER / f"page-{scheme}.png")


def telling(steps: list[dict[str, Any]]) -> int:
    """The step whose tree shows the most in the room there is."""

    def worth(step: dict[str, Any]) -> tuple[bool, int]:
        nodes = step["nodes"][1:]
        fits = len(nodes) <= 11 and max((node["depth"] for node in nodes), default=0) <= 3
        accepted = sum(node["accepted"] for node in nodes)
        return fits, 2 * min(accepted, 3) + min(len(nodes) - accepted, 6)

    return max(range(len(steps)), key=lambda number: worth(steps[number]))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    llm = LLM()
    llm.generate("Hello")  # measures costs
    with (
        serving(create_app(Runner(ServeSettings(), llm))) as address,
        sync_playwright() as playwright,
        chromium(playwright) as browser,
    ):
        draw(browser, address)
