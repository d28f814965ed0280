"""The page at `/`, in a headless Chromium, before a stand-in for the server."""

import hashlib
import re
from base64 import b64encode

import pytest

from drafters import KnownDrafter
from page_server import CHROMIUM, DEFAULT, EVIL, TEXT, Stand, chromium, serving, steps_of, words
from quickbeam import LLM
from quickbeam.config import ServerOptions
from quickbeam.drafters.base import GRAMMAR
from quickbeam.methods import METHODS, make_method
from quickbeam.serve.app import create_app
from quickbeam.serve.app import page as page_file
from quickbeam.serve.runner import Runner

sync_api = pytest.importorskip("playwright.sync_api")
if not CHROMIUM.exists():
    pytest.skip("there is no Chromium", allow_module_level=True)
REFUSED = re.compile(r"Failed to load resource: the server responded with a status of (4\d\d|503)")
WAIT = 8000  # milliseconds, for a loaded machine
expect = sync_api.expect  # what a page shows a moment later is waited for
expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright, chromium(playwright) as browser:
        yield browser


@pytest.fixture(scope="module")
def served():
    stand = Stand()
    with serving(stand.app) as (address, _):
        yield stand, address


@pytest.fixture
def stand(served):
    served[0].asked.clear()
    served[0].paths.clear()
    return served[0]


@pytest.fixture
def open_page(browser, served):
    """Opens the page. In the end: no error on any console, no request but to the server."""
    address, addresses, contexts, complaints, requests = served[1], {served[1]}, [], [], []

    def complain(message):
        if message.type in ("error", "warning") and not REFUSED.match(message.text):
            complaints.append(message.text)

    def open_it(path="/", width=1280, at=address, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        addresses.add(at)
        page.goto(at + path)
        page.locator("#model:not(:empty)").wait_for(state="attached")  # the page has met the server
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []
    here = ("data:", *(one + "/" for one in addresses))
    assert [url for url in requests if not url.startswith(here)] == []


def ask(page, prompt):
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def answered(page, prompt):
    """Ask, and wait for the end of the answer; gives its element."""
    before = page.locator(".turn").count()
    ask(page, prompt)
    page.locator(".turn:not(.busy)").nth(before).wait_for()
    return page.locator(".turn").last


def text(page, selector):
    return str(page.locator(selector).last.text_content())


def test_policy_names_what_the_file_holds_and_nothing_else():
    html, policy = page_file()
    for element in ("script", "style"):
        inside = html.split(f"<{element}>".encode())[1].split(f"</{element}>".encode())[0]
        digest = b64encode(hashlib.sha256(inside).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy
    markup = re.sub(r"<(script|style)>.*?</\1>", "", html.decode(), flags=re.DOTALL)
    assert not re.search(r"\s(style|on\w+)=", markup)  # what the policy would block
    # a name, which nothing loads
    assert set(re.findall(r"https?://[\w./]+", html.decode())) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in html.decode()


def test_answer_is_coloured_by_source(open_page, stand):
    page = open_page()
    answered(page, "rowans")
    assert text(page, ".text") == TEXT
    spans = "spans => spans.map(span => [span.textContent, span.classList[1]])"
    tokens = page.eval_on_selector_all(".token", spans)
    assert [piece for piece, _ in tokens] == [word.strip() for word in words("rowans")]
    wanted = ["target"]  # the first, from reading the prompt
    for step in steps_of(words("rowans"), "auto"):
        wanted += [node["source"] for node in step["nodes"][1:] if node["accepted"]] + ["target"]
    assert [kind for _, kind in tokens] == ["s-" + source.replace("_", "-") for source in wanted]
    styles = ".map(getComputedStyle).map(one => [one.backgroundColor, one.textDecoration])"
    looks = page.eval_on_selector_all(".legend .sample", f"all => all{styles}")
    assert len(looks) == 5 == len({colour for colour, _ in looks})
    # told apart without colour, too
    assert len({re.sub(r"rgb\S* ?|\(.*?\)", "", line) for _, line in looks}) == 5


DROP = """async ([kind, width, height, onto]) => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext("2d").fillRect(0, 0, width / 2, height);
  const blob = await new Promise((done) => canvas.toBlob(done));
  const data = new DataTransfer();
  data.items.add(new File([kind === "text" ? "abc" : blob], `a.${kind}`, { type: "image/png" }));
  const paste = onto === "#prompt";
  const event = new (paste ? ClipboardEvent : DragEvent)(paste ? "paste" : "drop",
    { dataTransfer: data, clipboardData: data, bubbles: true, cancelable: true });
  document.querySelector(onto).dispatchEvent(event);
}"""


def test_images_are_dropped_and_pasted(open_page, stand):
    page = open_page()
    waiting, sent = page.locator("#images img"), page.locator(".user img")
    page.evaluate(DROP, ["png", 3200, 800, "#turns"])
    expect(waiting).to_have_count(1)
    page.evaluate(DROP, ["png", 40, 30, "#prompt"])
    expect(waiting).to_have_count(2)
    page.get_by_role("button", name="Remove image 2").click()
    expect(waiting).to_have_count(1)
    answered(page, "rowans")
    expect(waiting).to_have_count(0)
    expect(sent).to_have_count(1)
    assert sent.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [1600, 400]
    image, text_part = stand.asked[-1]["messages"][-1]["content"]
    assert image["type"] == "image_url" and text_part == {"type": "text", "text": "rowans"}
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    answered(page, "rowans again")
    first, _, second = stand.asked[-1]["messages"]
    assert first["content"] == [image, text_part] and second["content"] == "rowans again"

    # what is no image, and a message that can't be answered, whose images come back
    page.evaluate(DROP, ["text", 9, 9, "#turns"])
    expect(page.locator("#notice")).to_contain_text("a.text is no image")
    page.evaluate(DROP, ["png", 9, 9, "#turns"])
    expect(waiting).to_have_count(1)
    ask(page, "odd")
    expect(page.locator("#notice")).to_contain_text("refuses this")
    expect(waiting).to_have_count(1)
    expect(sent).to_have_count(1)
    page.click("#new")
    expect(waiting).to_have_count(0)


def test_fenced_code_is_set_apart_with_its_indentation(open_page):
    page = open_page()
    answered(page, "code")
    assert text(page, ".text") == "".join(words("code"))
    code = page.locator(".text pre code")
    expected = ["def add(a, b):\n    return a + b\n", "add(1, 2)  ~~~~\n~~~\n", "\tls\n"]
    assert code.all_text_contents() == expected
    fences = page.locator(".text pre .fence").all_text_contents()
    assert fences == ["```python\n", "```\n", "~~~~\n", "~~~~\n", "  ```sh\n"]
    prose = page.locator(".text > div").all_text_contents()
    assert prose == ["Here it is:\n\n", "\nCall `add`:\n", "``` is a fence`.\n"]
    # indentation and every character's width are kept, and its tokens are marked
    first, wide = code.first, "one => [one, one.parentNode].map(getComputedStyle)"
    looks = f"one => ({wide})(one).map(look => [look.fontFamily, look.whiteSpace])"
    assert all("mono" in family and space == "pre" for family, space in first.evaluate(looks))
    assert first.locator(".token").all_text_contents()[:3] == ["def", "add", "(a"]
    assert first.locator(".s-drafter").count() > 0
    first.locator(".token").nth(1).click()
    assert page.locator(".token.on").all_text_contents() == ["\n", "def", "add", "(a"]


# Answers of pieces like these, as they come in steps and as a whole. Gives what differs.
IN_STEPS = """() => {
  const pieces = ["`", "``", "```", "~~~", "~~~~", "\\n", "\\n", "  ", "\\t", "py", "a `b`"];
  pieces.push("x".repeat(150));
  const draw = (most) => Math.floor(Math.random() * most);
  const part = (one) => [one.className || one.tagName, one.textContent];
  const shape = (box) => [...box.children].map((one) =>
    one.tagName === "PRE" ? [...one.children].map(part) : one.textContent);
  for (let round = 0; round < 300; round++) {
    const token = () => ({ text: pieces[draw(pieces.length)], source: "ngram", step: 0 });
    const tokens = Array.from({ length: 2 + draw(40) }, token);
    const build = (sizes) => {
      const answer = { text: "", tokens: [] };
      const box = document.createElement("div");
      const colouring = new Colouring(answer, box);
      for (const size of sizes) {
        for (const token of tokens.slice(answer.tokens.length, answer.tokens.length + size)) {
          answer.tokens.push(token);
          answer.text += token.text;
        }
        colouring.update(false);
        if (box.textContent !== answer.text) throw new Error("text was lost");
      }
      colouring.update(true);
      return box;
    };
    const [whole, steps] = [build([tokens.length]), build(tokens.map(() => 1))];
    const [first, second] = [whole, steps].map((box) => JSON.stringify(shape(box)));
    if (first !== second) return [first, second];
    const text = tokens.map((token) => token.text).join("");
    if (whole.textContent !== text || steps.textContent !== text) return [text, steps.textContent];
  }
  return [];
}"""


def test_code_looks_the_same_however_it_arrived(open_page):
    assert open_page().evaluate(IN_STEPS) == []


def test_underlines_can_be_switched_off(open_page):
    page = open_page()
    answered(page, "rowans")
    lines = "all => new Set(all.map(one => getComputedStyle(one).textDecorationLine)).size"
    assert page.eval_on_selector_all(".token", lines) == 2  # the target's have none
    switch = page.get_by_role("button", name="Underlines")
    expect(switch).to_have_attribute("aria-pressed", "true")
    switch.click()
    expect(switch).to_have_attribute("aria-pressed", "false")
    none = "all => all.every(one => getComputedStyle(one).textDecorationLine === 'none')"
    assert page.eval_on_selector_all(".token, .sample", none)
    page.reload()
    expect(switch).to_have_attribute("aria-pressed", "false")
    assert page.eval_on_selector_all(".sample", none)
    switch.click()
    assert not page.eval_on_selector_all(".sample", none)


# whether an element is seen in the box that scrolls it
SEEN = """([outer, inner]) => {
  const [a, b] = [outer, inner].map((one) => document.querySelector(one).getBoundingClientRect());
  const [across, down] = [[a.left, b.left, b.right, a.right], [a.top, b.top, b.bottom, a.bottom]];
  const rises = (all) => all.every((one, i) => i === 0 || all[i - 1] <= one + 1);
  return b.width > 0 && rises(across) && rises(down);
}"""


def test_the_chosen_step_is_scrolled_to(open_page):
    page = open_page(width=1280)
    answered(page, "lengthy")
    token, column = ["#turns", ".token.on"], ["#timeline", "#timeline [aria-selected=true]"]
    page.focus("#timeline [aria-selected=true]")
    for key in ("Home", "PageDown", "End", "PageUp"):
        page.keyboard.press(key)
        assert page.evaluate(SEEN, token) and page.evaluate(SEEN, column), key
    page.keyboard.press("Home")
    for _ in range(3):
        page.click("#after")
    assert page.evaluate(SEEN, token) and page.evaluate(SEEN, column)
    # where only one half is shown, it is scrolled when it is shown
    page = open_page(width=390)
    answered(page, "lengthy")
    number = page.locator(".token").count() // 2
    page.locator(".token").nth(number).click()
    assert page.evaluate(SEEN, column)
    assert page.evaluate(SEEN, ["#inspector", "#canvas"])
    page.focus("#timeline [aria-selected=true]")
    page.keyboard.press("Home")
    page.click("#show-chat")
    assert page.evaluate(SEEN, token)


def test_each_method_and_source_is_explained(open_page, stand):
    page = open_page()
    assert page.evaluate("Object.keys(METHODS)") == list(METHODS)
    methods = [make_method(name, KnownDrafter(None)) for name in METHODS]
    sources = {source.name for method in methods for source in method.sources}
    assert {*page.evaluate("Object.keys(SOURCES)")} == {*sources, GRAMMAR, "target"}
    options = page.locator("#method option").all_text_contents()
    assert options == [
        "auto (default): all sources, each where it pays",
        "ar: plain decoding, no drafts",
        "logitspec: second choices, continued from the text so far",
        "future",  # a newer server's
    ]
    page.select_option("#method", "ar")
    answered(page, "rowans")
    assert stand.asked[-1]["speculation"] == {"method": "ar"}


REFUSED_PROMPTS = {
    "9,000 words messages": ("This is too long", "8,192 tokens in all, about 5,800 words"),
    "9,000 words max_completion_tokens": ("The answer does not fit", "an answer of 256 tokens"),
    "bad": ("Temperature: the server refuses this", "It says: must be 0 or more."),
    "half a": ("Message: the server refuses this", "It says: must be whole characters."),
    "odd": ("The server does not take this request", f"the template refuses this: {EVIL}"),
}


@pytest.mark.parametrize("prompt", REFUSED_PROMPTS)
def test_what_cannot_be_answered_comes_back_for_editing(open_page, stand, prompt):
    title, reason = REFUSED_PROMPTS[prompt]
    page = open_page()
    answered(page, "rowans")
    ask(page, prompt)
    notice = page.locator("#notice")
    expect(notice.locator("strong")).to_have_text(title)
    told = notice.text_content()
    assert reason in told and not re.search("max_|_tokens|top_p|temperature=", told)
    expect(page.locator("#prompt")).to_have_value(prompt)
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("#send")).to_be_visible()
    assert page.locator("#turns img").count() == 0 and page.evaluate("window.hacked") is None
    answered(page, "edited")
    expect(notice).to_be_hidden()
    said = [message["content"] for message in stand.asked[-1]["messages"]]
    assert said == ["rowans", TEXT, "edited"]


def test_a_setting_that_is_refused_can_be_changed(open_page):
    page = open_page()
    ask(page, "9,000 words max_completion_tokens")
    page.locator("#notice button").click()
    expect(page.locator("#max_tokens")).to_be_focused()
    expect(page.locator(".welcome")).to_be_visible()  # there is no turn any more


@pytest.mark.parametrize(("schema", "reason"), [
    ('{"type": ', "This is not a JSON schema: "),
    ("[]", "This is not a JSON schema: a schema is an object"),
    ('{"type": "objekt"}', "hold an answer to this schema: Invalid type: objekt"),
])  # fmt: skip
def test_a_schema_that_cannot_be_is_told_in_its_dialog(open_page, stand, schema, reason):
    page = open_page()
    page.click("#open-settings")
    page.fill("#schema", schema)
    page.click("#done")
    problem = page.locator("#schema-problem")
    expect(problem).to_contain_text(reason)
    expect(page.locator("#settings")).to_be_visible()
    expect(page.locator("#schema")).to_be_focused()
    expect(page.locator("#schema")).to_have_attribute("aria-invalid", "true")
    page.keyboard.press("Escape")  # and asked nevertheless
    ask(page, "rowans")
    expect(page.locator("#settings")).to_be_visible()
    expect(problem).to_contain_text(reason)
    page.fill("#schema", '{"type": "object"}')
    expect(problem).to_be_hidden()
    page.click("#done")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#prompt")).to_have_value("rowans")
    page.press("#prompt", "Enter")
    page.locator(".turn:not(.busy) .token").first.wait_for()
    assert text(page, ".text") == TEXT


def test_request_says_what_was_set(open_page, stand):
    page = open_page()
    page.click("#open-settings")
    values = dict(
        temperature="0.7", top_p="0.9", seed="11", max_tokens="40", budget="6", system="Be brief.",
        key="rowan", schema='{"type": "object"}',
    )  # fmt: skip
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#settings button[type=submit]")
    page.select_option("#method", "logitspec")
    answered(page, "locked one")
    answered(page, "second")
    body = stand.asked[-1]
    assert body["authorization"] == "Bearer rowan"
    asked = {
        "model": "rowan-135m", "stream": True, "trace": True, "temperature": 0.7, "top_p": 0.9,
        "seed": 11, "max_completion_tokens": 40, "stream_options": {"include_usage": True},
        "speculation": {"method": "logitspec", "budget": 6},
    }  # fmt: skip
    assert asked.items() <= body.items()
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == TEXT
    stores = "JSON.stringify(sessionStorage), JSON.stringify(localStorage) + document.cookie"
    kept = page.evaluate(f"[{stores}]")
    assert '"rowan"' in kept[0] and "rowan" not in kept[1]


def test_steps_are_chosen_by_keyboard(open_page):
    page = open_page()
    answered(page, "rowans")
    steps = steps_of(words("rowans"), "auto")
    expect(page.locator("#timeline [role=option]")).to_have_count(len(steps))
    # the newest, while nothing else is chosen
    assert text(page, "#step-title") == f"Step {len(steps)} of {len(steps)}"
    page.focus("#timeline [aria-selected=true]")
    end, focus = len(steps) - 1, "document.activeElement"
    keys = ("Home", "ArrowRight", "ArrowDown", "ArrowLeft", "End", "ArrowUp")
    for key, chosen in zip(keys, (0, 1, 2, 1, end, end - 1), strict=True):
        page.keyboard.press(key)
        assert text(page, "#step-title") == f"Step {chosen + 1} of {len(steps)}"
        assert page.evaluate(f"[...{focus}.parentNode.children].indexOf({focus})") == chosen
        expect(page.locator("#timeline [aria-selected=true]")).to_have_count(1)
        expect(page.locator("#tree .node[data-node]")).to_have_count(len(steps[chosen]["nodes"]))
        accepted = sum(node["accepted"] for node in steps[chosen]["nodes"])
        expect(page.locator("#tree .node[data-node].taken")).to_have_count(accepted)
        after = steps[chosen]["next"]["text"].replace(" ", "·")
        assert page.locator("#tree .node.next").text_content().endswith(after)
        # and the prompt's, before the first
        expect(page.locator(".token.on")).to_have_count(steps[chosen]["emitted"] + (chosen == 0))
    page.keyboard.press("Home")
    page.click("#after")
    assert text(page, "#step-title").startswith("Step 2 ")
    page.locator(".token").nth(5).click()
    assert text(page, "#step-title").startswith("Step 3 ")
    page.click("#as-table summary")
    expect(page.locator("#table tbody tr")).to_have_count(len(steps[2]["nodes"]) + 1)
    assert "drafting 10.0 ms" in text(page, "#times") and "the rest 20.0 ms" in text(page, "#times")
    emitted = sum(step["emitted"] for step in steps)
    assert text(page, "#speed") == f"{emitted / sum(step['seconds'] for step in steps):.1f}"
    assert text(page, "#mean") == f"{emitted / len(steps):.2f}"


def test_beside_plain_decoding(open_page, stand):
    page = open_page()
    page.check("#beside")
    answered(page, "rowans")
    assert page.locator(".verdict.same").text_content() == f"✓ identical, {len(DEFAULT)} tokens"
    ours, plain = stand.asked
    assert plain["speculation"] == {"method": "ar"} and "speculation" not in ours
    assert {**plain, "speculation": None} == {**ours, "speculation": None}  # the seed, too
    speeds = page.locator(".race .number").all_text_contents()
    assert speeds[1] == "20.0 tokens/s"
    assert text(page, ".ratio").startswith(f"{float(speeds[0].split()[0]) / 20:.2f}")


def test_a_difference_is_told(open_page):
    page = open_page()
    answered(page, "differs").locator("button.compare").click()
    page.locator(".verdict.differs").wait_for()
    assert text(page, ".verdict") == "✗ differs: token 5 is “·small” here, “·oak” there"
    assert " a oak tree " in text(page, ".beside pre")


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop(open_page, stand, how):
    page = open_page()
    ask(page, "endless")
    page.locator(".token").nth(20).wait_for()
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    page.locator("#send").wait_for()
    assert "stopped by you" in text(page, ".meta")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".turn .compare")).to_have_count(0)  # half an answer can't be compared
    while stand.open:  # until the connection is closed
        page.wait_for_timeout(20)
    answered(page, "again")
    roles = [message["role"] for message in stand.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_what_the_model_writes_stays_text(open_page):
    page = open_page()
    answered(page, "evil " + EVIL)
    assert text(page, ".text") == "".join(words("evil"))
    assert text(page, ".user") == "You: evil " + EVIL
    page.focus("#timeline [aria-selected=true]")
    page.keyboard.press("Home")
    page.click("#as-table summary")
    ask(page, "odd")
    expect(page.locator("#notice")).to_contain_text(EVIL)
    expect(page.locator("img, #turns script, #inspector script")).to_have_count(0)
    assert page.evaluate("window.hacked") is None


def test_busy_server_is_told_and_tried_again(open_page, stand):
    page = open_page()
    stand.busy = 1
    turn = answered(page, "full")
    assert turn.locator(".error strong").text_content() == "The server is busy"
    error = turn.locator(".error").text_content().replace("already.", "already")
    assert "64 requests wait already Try again in 7 seconds." in error
    turn.locator(".error button").click()
    page.locator(".token").first.wait_for()
    page.locator(".turn:not(.busy)").wait_for()
    assert text(page, ".text") == TEXT and page.locator(".turn .error").count() == 0


def test_a_missing_key_is_asked_for(open_page):
    page = open_page()
    turn = answered(page, "locked")
    assert turn.locator(".error strong").text_content() == "The server wants an API key"
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("rowan")
    page.keyboard.press("Enter")
    turn.locator(".error button").click()
    page.locator(".token").first.wait_for()


@pytest.mark.parametrize(
    ("prompt", "title"),
    [("fails", "The server ended the answer"), ("breaks", "The connection broke")],
)
def test_an_answer_that_breaks_off(open_page, prompt, title):
    page = open_page()
    assert answered(page, prompt).locator(".error strong").text_content() == title
    assert text(page, ".text") and TEXT.startswith(text(page, ".text"))


def test_keyboard_alone(open_page, stand):
    page = open_page()
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.locator(".actions button").first.wait_for()
    assert stand.asked[-1]["messages"][-1]["content"] == "one\ntwo"
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        look = "[at.id || at.role || at.className, getComputedStyle(at).outlineStyle]"
        where = page.evaluate(f"(at => {look})(document.activeElement)")
        if where[0] == "prompt":
            break
        reached.append(where)
    names = [name for name, _ in reached]
    order = ["method", "beside", "send", "option", "before", "canvas", "new", "open-settings"]
    order += ["underlines", "theme", "turns"]
    # "after" is off at the last step; the page begins again after the table
    assert [name for name in names if name in order] == order
    # the focus is seen wherever it is
    assert [name for name, line in reached if name and line == "none"] == []


def test_works_behind_a_path_prefix(open_page, stand):
    page = open_page("/some/prefix/")
    answered(page, "rowans")
    assert text(page, ".text") == TEXT
    assert stand.paths == ["/some/prefix/v1/models", "/some/prefix/v1/chat/completions"]


def test_real_server(open_page, toy_folder):
    with serving(create_app(Runner(ServerOptions(), LLM(str(toy_folder))))) as (address, _):
        page = open_page(at=address)
        page.set_default_timeout(120_000)
        page.click("#open-settings")
        page.fill("#max_tokens", "40")
        page.fill("#temperature", "0.9")
        page.keyboard.press("Enter")
        page.check("#beside")
        for number, question in enumerate(["abcabcabc", "abcabcabc again"]):
            turn = answered(page, question)
            turn.locator(".verdict.same").wait_for()
            assert page.locator("#timeline [role=option]").count() > 0
            assert page.locator("#tree .node[data-node]").count() >= 1
            answer = str(page.locator(".text").nth(number).text_content())
            assert answer and answer == page.evaluate(f"turns[{number}].answer.text")
            tokens = "".join(turn.locator(".token").all_text_contents())
            assert tokens.replace(" ", "") == answer.replace(" ", "")
        for question, told in (("abc " * 400, "This is too long"), ("abc " * 7000, "too long")):
            ask(page, question)
            expect(page.locator("#notice")).to_contain_text(told, timeout=60_000)
            expect(page.locator("#prompt")).to_have_value(question)
        page.click("#open-settings")
        page.fill("#max_tokens", "100000")
        page.keyboard.press("Enter")
        page.click("#new")
        ask(page, "abc")
        expect(page.locator("#notice")).to_contain_text("The answer does not fit", timeout=60_000)
        page.click("#open-settings")
        page.fill("#schema", '{"type": "objekt"}')
        page.click("#done")
        expect(page.locator("#schema-problem")).to_contain_text("objekt", timeout=60_000)
