"""Images that clients send: what the official clients get, and what becomes of hostile ones."""

import base64
import io
import struct
import sys
import time
import zlib

import anthropic
import openai
import pytest

from quickbeam.config import ServerOptions
from quickbeam.llm import LLM
from quickbeam.models.native import library
from quickbeam.models.vision import image as images
from quickbeam.models.vision.image import PromptImage
from quickbeam.params import SamplingParams
from quickbeam.serve.runner import Runner
from running import serving
from serving import ask, good, refused

pytest.importorskip("PIL", reason="images need Pillow")
pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

from vision import asked, file_of, picture, vision_folder  # noqa: E402

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SAME = {"max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm(toy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    vision_folder("smolvlm", toy_folder, folder)
    with LLM(str(folder), "auto", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def runner(llm):
    return Runner(ServerOptions(served_names=("m",)), llm)


@pytest.fixture(scope="module")
def address(runner):
    with serving(runner) as (address, _):
        yield address


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data, kind="image/png", **more):
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), **more}}


def block(data, kind="image/png"):
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def text(words):
    return {"type": "text", "text": words}


def test_the_official_client_of_openai(llm, address):
    one, two = picture(1, 60, 34), picture(2)
    right = llm.chat(asked("see ", one, " and ", two), GREEDY)
    jpeg = file_of(two, "JPEG", quality=100, subsampling=0)
    api = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    content = [text("see "), part(file_of(one)), text(" and "), part(file_of(two), detail="auto")]
    conversation = [{"role": "user", "content": content}]
    answer = api.chat.completions.create(model="m", messages=conversation, **SAME)
    assert answer.choices[0].message.content == right.text
    prompt = llm.encode_chat(asked("see ", one, " and ", two))
    assert answer.usage.prompt_tokens == len(prompt)
    stream = api.chat.completions.create(model="m", messages=conversation, stream=True, **SAME)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == right.text

    # another turn, with an image of another kind
    answered = {"role": "assistant", "content": right.text}
    more = [text("this? "), part(jpeg, "image/jpeg")]
    turns = [*conversation, answered, {"role": "user", "content": more}]
    answer = api.chat.completions.create(model="m", messages=turns, **SAME)
    turns = [*asked("see ", one, " and ", two), answered, *asked("this? ", jpeg)]
    assert answer.choices[0].message.content == llm.chat(turns, GREEDY).text
    assert answer.usage.prompt_tokens_details.cached_tokens > 0

    shown = [{"type": "input_text", "text": "see "}]
    shown.append({"type": "input_image", "image_url": data_url(file_of(one)), "detail": "auto"})
    limits = {"max_output_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}
    response = api.responses.create(model="m", input=[{"role": "user", "content": shown}], **limits)
    assert response.output_text == llm.chat(asked("see ", one), GREEDY).text


def test_the_official_client_of_anthropic(llm, address):
    one, two = picture(1, 60, 34), picture(2)
    api = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    conversation = [{"role": "user", "content": [text("see "), block(file_of(one))]}]
    settings = {"model": "m", "max_tokens": 10}
    settings["extra_body"] = {"ignore_eos": True, "temperature": 0}
    answer = api.messages.create(messages=conversation, **settings)
    assert answer.content[0].text == llm.chat(asked("see ", one), GREEDY).text
    counted = api.messages.count_tokens(model="m", messages=conversation)
    assert counted.input_tokens == len(llm.encode_chat(asked("see ", one)))

    # a tool that returns an image, as agents have them
    called = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [text("a b"), block(file_of(two))],
    }
    conversation += [{"role": "assistant", "content": [called]}]
    conversation += [{"role": "user", "content": [result, text(" what?")]}]
    answer = api.messages.create(messages=conversation, **settings)
    tool = {"role": "tool", "content": "a b", "tool_call_id": "t", "name": "look"}
    turns = [*asked("see ", one), {"role": "assistant", "content": ""}, tool, *asked(two, " what?")]
    assert answer.content[0].text == llm.chat(turns, GREEDY).text


def test_counts_and_notes(llm, runner):
    message = {"role": "user", "content": [text("see "), part(file_of(picture(1)), detail="high")]}
    counted = good(ask(runner, "/tokenize", {"messages": [message]}))
    assert counted["tokens"] == llm.encode_chat(asked("see ", picture(1)))
    response = ask(runner, CHAT, {"messages": [message], "max_tokens": 2})
    assert good(response) and response.headers["x-quickbeam-ignored"] == "image_url.detail"


# hostile images


def png(width, height, *more, data=b""):
    """A PNG's bytes of a header, other chunks and its compressed data."""

    def chunk(kind, body):
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def bomb():
    """A text of 200 MB in a few hundred kilobytes, beside an image of one pixel."""
    packed = zlib.compress(bytes(200_000_000), 9)
    return png(1, 1, (b"zTXt", b"Comment\0\0" + packed), data=bytes(4))


def animated(kind):
    frames = [picture(seed) for seed in (1, 2, 3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def scans(side, count):
    """A JPEG of many scans of a few bytes, each of which goes over the whole image."""

    def segment(mark, body):
        return bytes([0xFF, mark]) + struct.pack(">H", len(body) + 2) + body

    def table(number, value):  # in which the bit 0 stands for a value
        return segment(0xC4, bytes([number, 1, *[0] * 15, value]))

    blocks = (side // 8) ** 2
    frame = struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])
    begin = b"\xff\xd8" + segment(0xDB, bytes([0, *[1] * 64])) + segment(0xC2, frame)
    begin += table(0x00, 0) + table(0x10, 0xE0)  # no difference; a run of 32,767 empty blocks
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(blocks // 8 + 1)
    bits = ("0" + "1" * 14) * (blocks // 32767 + 1)
    bits += "0" * (-len(bits) % 8)
    runs = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    scan = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + runs
    return begin + first + scan * count + b"\xff\xd9"


WHOLE = file_of(picture(1, 300, 200))
PHOTO = file_of(picture(1, 300, 200), "JPEG")
HOSTILE = {
    "100 megapixels": (lambda: png(10_000, 10_000, data=bytes(9)), "million pixels"),
    "gigapixels": (lambda: png(60_000, 60_000, data=bytes(9)), "million pixels"),
    "2**31 pixels a side": (lambda: png(2**31 - 1, 2**31 - 1), "million pixels|can't be read"),
    "a bomb of text": (bomb, "can't be read"),
    "a line": (lambda: png(20_000, 2), "longer side"),
    "no pixels": (lambda: png(0, 5), "can't be read|longer side"),
    "a truncated PNG": (lambda: WHOLE[: len(WHOLE) // 2], "can't be read"),
    "a truncated JPEG": (lambda: PHOTO[: len(PHOTO) // 2], "can't be read"),
    "a header alone": (lambda: WHOLE[:40], "can't be read"),
    "nothing": (lambda: b"", "can't be read"),
    "noise": (lambda: bytes(range(256)) * 40, "can't be read"),
    "an animated GIF": (lambda: animated("GIF"), "animated"),
    "an animated PNG": (lambda: animated("PNG"), "animated"),
    "an animated WebP": (lambda: animated("WEBP"), "animated"),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "can't be read"),
    "TIFF": (lambda: file_of(picture(1), "TIFF"), "can't be read"),
    "BMP": (lambda: file_of(picture(1), "BMP"), "can't be read"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "can't be read"),
}


def peak_memory():
    """The most kilobytes that this process had; 0 where that is not known."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_soon(runner, name):
    make, words = HOSTILE[name]
    data = make()
    before = peak_memory()
    began = time.perf_counter()
    response = ask(runner, CHAT, {"messages": [{"role": "user", "content": [part(data)]}]})
    message = refused(response, "messages")
    assert message.startswith(("message 0: ", "image 1 of the prompt: ")), message
    assert any(word in message for word in words.split("|")), message
    assert time.perf_counter() - began < 20  # seconds, on a machine that does other things, too
    assert peak_memory() - before < 150_000
    good(ask(runner, CHAT, {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}))


def test_decoding_ends_at_its_time(monkeypatch):
    data = scans(5000, 800)
    assert len(data) < 100_000
    monkeypatch.setattr(images, "DECODE_SECONDS", 600)
    began = time.thread_time()
    PromptImage(data).decode()
    whole = time.thread_time() - began
    monkeypatch.setattr(images, "DECODE_SECONDS", whole / 20)
    began = time.thread_time()
    with pytest.raises(images.InvalidInput, match="takes too long"):
        PromptImage(data).decode()
    assert time.thread_time() - began < whole / 2


URLS = {
    "http": ("https://example.org/x.png", "isn't followed"),
    "a file": ("file:///etc/passwd", "isn't followed"),
    "a path": ("/etc/passwd", "isn't followed"),
    "no base64": ("data:image/png,%89PNG", "must be in base64"),
    "SVG": ("data:image/svg+xml;base64,PHN2Zy8+", "must be in base64 and of one of"),
    "HTML": ("data:text/html;base64,PHN2Zy8+", "must be in base64 and of one of"),
    "no type": ("data:;base64,AAAA", "must be in base64 and of one of"),
    "bad base64": ("data:image/png;base64,!!!!", "base64 is damaged"),
    "half base64": ("data:image/png;base64,AAAAA", "base64 is damaged"),
    "not ASCII": ("data:image/png;base64,ééé", "base64 is damaged"),
    "a long head": (f"data:image/png{';a=b' * 100_000};base64,AA", "isn't followed"),
    "empty": ("", "isn't followed"),
}


@pytest.mark.parametrize("name", URLS)
def test_hostile_urls_are_refused(runner, name):
    url, words = URLS[name]
    content = [{"type": "image_url", "image_url": {"url": url}}]
    response = ask(runner, CHAT, {"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert len(response.text) < 1500


def test_large_bodies_and_many_images_are_refused(llm, runner, monkeypatch):
    huge = part(bytes(7_000_000))
    response = ask(runner, CHAT, {"messages": [{"role": "user", "content": [huge]}]})
    assert response.status_code == 413
    tiny = [part(file_of(picture(seed, 2, 2))) for seed in range(100)]
    response = ask(runner, CHAT, {"messages": [{"role": "user", "content": tiny * 10}]})
    assert "can't fit" in refused(response, "messages")
    began = time.perf_counter()
    monkeypatch.setattr(llm.model.pool, "limit", 40)
    response = ask(runner, CHAT, {"messages": [{"role": "user", "content": tiny}]})
    assert "100 images have more rows" in refused(response, "messages")
    assert time.perf_counter() - began < 30
    large = part(png(6000, 5000, data=bytes(9)))
    response = ask(runner, CHAT, {"messages": [{"role": "user", "content": [large] * 5}]})
    assert "150 million pixels together" in refused(response, "messages")


# images as they come


def pixels_of(data):
    return PromptImage(data).decode()


def test_images_are_turned_upright():
    from PIL import Image

    turns = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}
    turns |= {8: Image.Transpose.ROTATE_90, 2: Image.Transpose.FLIP_LEFT_RIGHT}
    image = picture(4)
    for number, turn in turns.items():
        exif = Image.Exif()
        exif[0x0112] = number
        upright = pixels_of(file_of(image, exif=exif))
        assert upright.tobytes() == image.transpose(turn).tobytes()
        assert pixels_of(file_of(image, "JPEG", exif=exif)).size == upright.size
    broken = file_of(image, "JPEG", exif=b"Exif\0\0" + bytes(range(60)))
    assert pixels_of(broken).size == image.size


def test_other_kinds_of_pixels():
    from PIL import Image

    image = picture(4)
    for mode in ("L", "LA", "RGBA", "P", "1", "CMYK", "I;16"):
        converted = image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)
        kind = "JPEG" if mode == "CMYK" else "PNG"
        assert pixels_of(file_of(converted, kind)).mode == "RGB"
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert pixels_of(file_of(clear)).getpixel((1, 1)) == (255, 255, 255)
    palette = clear.convert("P")
    assert pixels_of(file_of(palette, transparency=0)).getpixel((1, 1)) == (255, 255, 255)


def test_images_of_pillows_that_cannot_be_read():
    from PIL import Image

    cut = Image.open(io.BytesIO(file_of(picture(4, 200, 200), "JPEG")[:-900]))  # not decoded yet
    for image in (cut, picture(4).convert("LA").convert("La")):
        with pytest.raises(images.InvalidInput, match="the image can't be read"):
            PromptImage(image)
    with pytest.raises(images.InvalidInput, match="of too many pixels: at most 32 million"):
        PromptImage(file_of(Image.new("1", (20000, 20000))))


def test_what_python_gives(llm, tmp_path):
    image = picture(5)
    path = tmp_path / "image.png"
    path.write_bytes(file_of(image))
    right = llm.encode_chat(asked("see", image))
    for given in (path, str(path), path.read_bytes(), bytearray(path.read_bytes())):
        message = {"role": "user", "content": [text("see"), {"type": "image", "image": given}]}
        assert llm.encode_chat([message]) == right
    url = [{"role": "user", "content": [text("see"), part(path.read_bytes())]}]
    assert llm.chat(url, GREEDY).token_ids == llm.chat(asked("see", image), GREEDY).token_ids
    for given, words in (
        (tmp_path / "none.png", "No such file"),
        (tmp_path, "directory|Permission"),
        (7, "give an image of Pillow's"),
        (None, "give an image of Pillow's"),
        ("a\0b", "null"),
    ):
        message = {"role": "user", "content": [{"type": "image", "image": given}]}
        with pytest.raises(images.InvalidInput, match=f"message 0: .*({words})"):
            llm.encode_chat([message])


def test_without_pillow(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(images.InvalidInput, match=r"pip install 'quickbeam\[images\]'"):
        llm.encode_chat(asked(WHOLE))


def test_a_file_in_memory_can_be_read_until_its_time():
    file = images.TimedFile(b"abc", time.thread_time() + 60)
    assert file.read(2) == b"ab" and file.read() == b"c"
    late = images.TimedFile(b"abc", time.thread_time() - 1)
    with pytest.raises(TimeoutError):
        late.read(1)
    assert isinstance(late, io.BytesIO)
