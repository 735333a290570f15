"""Prompts of a step, answers with their tokens, one prompt over steps, validations, in a browser."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests import view_runs
from tests.browser.chromium import Page
from tests.view_runs import TOOL_OUTPUT, answer_text, prompt_text

# classes of the first tokens: strength 0 to 8 of logprob -(i % 8) / 4 of 5, entropy (i % 4) / 2 of 3, and so on
LEVELS = {
    "logprob": ["", "", "s1", "s1", "s2", "s2", "s2", "s3"],
    "entropy": ["", "s1", "s3", "s4", "", "s1", "s3", "s4"],
    "advantage": ["p8"] * 8,  # the first answer of group 1 has score 1.0, the others of the same size below 0
    "ratio": ["n3", "", "p2", "n3", "", "p2", "n3", ""],  # 0.875, 1, 1.125 on the scale of log(1.5)
}


def column(page: Page, number: int) -> list[str]:
    return [row[number] for row in page.table("table.prompts tbody")]


def test_the_table_has_the_numbers_of_each_prompt(page: Page) -> None:
    page.open("finished/step/3")
    rows = page.table("table.prompts tbody")
    # step 3: the first (g + 3) % 5 of 4 answers have score 1
    assert column(page, 0) == ["0", "1", "2", "3", "4", "5"]
    assert column(page, 1) == ["0.75", "1.00", "0.00", "0.25", "0.50", "1.00"]
    assert column(page, 5) == ["0", "0", "0", "0", "0", "1 / 4"]
    assert rows[4][2:4] == ["1.00", "0.00"]
    assert rows[0][7:] == ["sums", prompt_text(6)]
    assert page.text(".page-head .muted") == "6 prompts"


def test_a_click_on_a_head_sorts_and_another_one_turns_the_order(page: Page) -> None:
    page.open("finished/step/3")
    page.one("[data-sort=mean]").click()
    page.wait(lambda: column(page, 1) == ["1.00", "1.00", "0.75", "0.50", "0.25", "0.00"])
    assert page.one("th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.one("[data-sort=mean]").click()
    page.wait(lambda: column(page, 1)[0] == "0.00")
    page.wait(lambda: page.script("return location.hash").endswith("sort=mean"))  # ascending is the default


def test_filters_by_text_source_and_score(page: Page) -> None:
    page.open("finished/step/3")
    page.press("/", "question 7")
    page.wait(lambda: column(page, 0) == ["1"])
    assert page.text(".page-head .muted") == "1 of 6 prompts"
    page.press(*[Keys.BACKSPACE] * 10)
    page.wait(lambda: len(column(page, 0)) == 6)
    page.one("#source option[value=colours]").click()
    page.wait(lambda: column(page, 0) == ["1", "3", "5"])
    page.open("finished/step/3?min=0.6&max=0.8")
    assert column(page, 0) == ["0"]
    page.open("finished/step/3?text=nowhere")
    assert page.texts(".empty h2") == ["No prompt matches"]


def test_pages_of_rows(page: Page) -> None:
    page.open("finished/step/3?size=4")
    assert column(page, 0) == ["0", "1", "2", "3"]
    assert page.text(".pager span") == "1–4 of 6"
    page.one(".pager [aria-label='Next page']").click()
    page.wait(lambda: column(page, 0) == ["4", "5"])
    page.press("p")
    page.wait(lambda: column(page, 0)[0] == "0")


def test_keys_move_open_and_change_the_step(page: Page) -> None:
    page.open("finished/step/3")
    page.press("j", "j", Keys.ARROW_DOWN, "k")
    page.wait(lambda: page.text("tr.current td") == "1")
    page.press(Keys.ENTER)
    page.wait(lambda: page.text("main h1") == "Step 3 / prompt 1")
    page.press("j")
    page.wait(lambda: page.text("main h1") == "Step 3 / prompt 2")
    page.press("k")
    page.wait(lambda: page.text("main h1") == "Step 3 / prompt 1")
    page.press(Keys.ESCAPE)
    page.wait(lambda: page.text("main h1") == "Step 3")
    page.press("]")
    page.wait(lambda: page.text("main h1") == "Step 4")
    page.press("[")
    page.wait(lambda: page.text("main h1") == "Step 3")
    page.press("g", "v")
    page.wait(lambda: page.text("main h1") == "Validation before and after")
    page.press("g", "o")
    page.wait(lambda: page.script("return document.querySelector('main').dataset.page") == "overview")
    page.press("?")
    assert "validation" in page.one("#keys[open]").text
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.all("#keys[open]"))


def test_answers_have_scores_parts_the_words_of_the_judge_and_how_they_ended(page: Page) -> None:
    page.open("finished/step/3/prompt/1")  # row 7 of the data: colours, all four right
    page.wait(lambda: len(page.all(".answer-text .token")) > 40)
    assert page.text(".prompt-text") == prompt_text(7)
    assert page.text(".expected .text") == "blue"
    assert page.texts(".answer .score") == ["1.00"] * 4
    assert page.texts(".answer .verdict") == ["✓ right"] * 4
    assert page.texts(".answer .parts")[0] == "judge1.00format0.500"
    assert page.texts(".judge")[0] == "The judge gives 1.0: it names the colour."
    assert [text for text in page.texts(".tag") if text in ("finished", "cut off")] == [
        "finished", "cut off", "finished", "finished"]  # fmt: skip
    facts = dict(zip(page.texts(".facts dt"), page.texts(".facts dd"), strict=True))
    assert facts["Weights"] == "after step 2"  # the same for all answers: said once
    assert page.texts(".answer-text") == [answer_text(7, 3, place, 1.0) for place in range(4)]


def test_a_failed_score_shows_its_reason(page: Page) -> None:
    page.open("finished/step/3/prompt/5")
    assert page.texts(".answer .score")[3] == "–"
    assert page.texts(".reason") == ["No score: judge: no answer within 30 s"]


@pytest.mark.parametrize("quantity", LEVELS)
def test_tokens_are_coloured_by_each_quantity(page: Page, quantity: str) -> None:
    page.open("finished/step/3/prompt/4")
    page.wait(lambda: page.all(".answer-text .token"))
    page.one(f"[data-colour={quantity}]").click()
    tokens = "[...document.querySelector('.answer-text').querySelectorAll('.token')].slice(0, 8)"
    classes = f"return {tokens}.map(token => token.className.replace(/^token ?/, ''))"
    page.wait(lambda: page.script(classes) == LEVELS[quantity])
    backgrounds = page.script(f"return {tokens}.map(token => getComputedStyle(token).backgroundColor)")
    assert len(set(backgrounds)) == len(set(LEVELS[quantity]))
    assert page.texts(".scale") != []
    if quantity == "advantage":
        assert page.texts(".scale-ends span") == ["−0.500", "0", "0.500"]
        wrong = "[...document.querySelectorAll('.answer-text')][3].querySelector('.token').className"
        assert page.script(f"return {wrong}") == "token n8"


def test_plain_text_has_no_colours(page: Page) -> None:
    page.open("finished/step/3/prompt/4")
    page.wait(lambda: page.all(".answer-text .token"))
    page.press("c")
    page.one("[data-colour=plain]").click()
    page.wait(lambda: not page.all(".answer-text.coloured"))
    assert page.texts(".scale") == []


def test_a_token_shows_its_numbers_under_the_pointer_and_by_keys(page: Page) -> None:
    page.open("finished/step/3/prompt/4")
    token = page.one(".answer-text .token:nth-child(4)")
    ActionChains(page.browser).move_to_element(token).perform()
    shown = page.wait(lambda: page.texts(".inspector dd"))
    assert shown == ["47.24\u202f%", "−0.7500", "0.5000", "1.5000", "0.8750"]
    page.script("document.querySelector('.answer-text').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.wait(lambda: "token 2 of" in page.text(".inspector"))
    assert page.texts(".inspector dd")[1:] == ["−0.2500", "0.5000", "0.5000", "1.0000"]


def test_turns_and_the_output_of_tools_are_marked(page: Page) -> None:
    page.open("finished/step/4/prompt/2")
    page.wait(lambda: page.all(".answer-text .token"))
    turns = "[...document.querySelector('.answer-text').querySelectorAll('.turn')]"
    labels = page.script(f"return {turns}.map(turn => turn.dataset.label)")
    assert labels == ["turn 1", "tool output, not trained", "turn 2"]
    masked = "[...document.querySelector('.answer-text').querySelectorAll('.masked')].map(x => x.textContent).join('')"
    assert page.script(f"return {masked}") == TOOL_OUTPUT
    assert page.texts(".newline")[0] == "\n"


def test_tokens_of_a_very_long_answer_are_made_while_it_is_scrolled(page: Page) -> None:
    page.open("hostile/step/1/prompt/6")  # 20,000 times W
    count = "return document.querySelectorAll('.answer-text')[0].querySelectorAll('.token').length"
    first = page.wait(lambda: page.script(count))
    assert 1000 < first < 5000
    assert len(page.text(".answer-text")) == 20_000
    page.script("const box = document.querySelector('.answer-text'); box.scrollTop = box.scrollHeight")
    page.wait(lambda: page.script(count) > first)
    assert len(page.text(".answer-text")) == 20_000


def test_answers_can_be_ordered(page: Page) -> None:
    page.open("finished/step/3/prompt/3")
    page.one("#order option[value=worst]").click()
    page.wait(lambda: page.texts(".answer .score") == ["0.00", "0.00", "0.00", "1.00"])


def test_a_prompt_over_steps_shows_its_curve_and_what_changed(page: Page) -> None:
    page.open("finished/step/3/prompt/4")
    assert page.text("#history") == "This prompt over steps (4)"
    page.one("#history").click()
    page.wait(lambda: page.text("main h1") == "Prompt 10 over steps")  # row (6 * 3 + 4) % 12
    page.wait(lambda: len(page.all("[data-chart=history] circle")) == 4)  # steps 1, 3, 5, 7
    page.wait(lambda: page.texts(".column .answer-text"))
    assert page.texts(".column > header h2") == ["Step 1", "Step 7"]
    assert page.texts("del")[0] == "1" and page.texts("ins")[0] == "7"
    page.press("[")
    page.wait(lambda: page.texts(".column > header h2") == ["Step 1", "Step 5"])
    assert page.script("return location.hash").endswith("?after=5")


def test_validation_counts_what_was_fixed_and_broken(page: Page) -> None:
    page.open("finished/validation")
    counts = dict(zip(page.texts(".outcome-name"), page.texts(".outcomes b"), strict=True))
    assert counts == {"↑ Fixed": "2", "↓ Broken": "1", "✓ Right both times": "1", "✗ Wrong both times": "1", "All": "5"}
    rows = {row[0]: row[1:] for row in page.table("table.by-source tbody")}
    assert rows["sums"] == ["33.3\u202f%", "100.0\u202f%", "+66.7", "2", "0", "1", "0"]
    assert rows["colours"] == ["50.0\u202f%", "0.0\u202f%", "−50.0", "0", "1", "0", "1"]
    assert page.text(".toolbar .muted") == "5 prompts, 1 more without a score"
    page.one("[data-outcome=broken]").click()
    page.wait(lambda: page.texts(".pair .outcome") == ["↓ Broken"])
    assert page.texts(".side .text") == [answer_text(1, 0, 0, 1.0), answer_text(1, 8, 0, 0.0)]
    assert page.texts(".side .score") == ["1.00", "0.00"]
    page.one("#after option[value='4']").click()
    page.wait(lambda: page.texts(".outcomes b")[1] == "0")
    page.open("finished/validation")
    page.press("j", Keys.ENTER)
    page.wait(lambda: page.text("main h1") == "Validation at step 8 / prompt 0")


def test_a_prompt_of_one_step_says_so(page: Page) -> None:
    page.open("templated/step/1/prompt/0")
    assert page.text("#history") == "This prompt is in one step only" and page.all("a#history") == []
    page.open("templated/prompt/0")
    assert page.text(".one-step").startswith("Only one step has this prompt")
    assert page.texts("[data-chart=history]") == []


def test_prompts_are_shown_by_the_last_message_of_the_user(page: Page) -> None:
    page.open("templated/step/1")
    assert column(page, 8) == [view_runs.QUESTION] * len(view_runs.TEMPLATES)
    page.open("templated/step/1/prompt/0")
    assert page.text(".prompt-text") == view_runs.QUESTION
    assert page.text(".whole-prompt .text") == view_runs.TEMPLATES[0]
    assert not page.one(".whole-prompt .text").is_displayed()
    # "wrong" says what the part `acc` would repeat
    assert page.texts(".answer .verdict") == ["✓ right", "✗ wrong"]
    assert page.texts(".answer .parts") == ["format0.500"] * 2


def test_the_answers_of_two_runs_stand_side_by_side(page: Page) -> None:
    other, finished = page.runs["other"], page.runs["finished"]
    page.open(f"#/compare/{other},{finished}")
    page.wait(lambda: page.texts("#two-runs .pair"))
    # the last validations: step 4 of `other`, step 8 of `finished`
    assert page.texts("#two-runs .outcomes b") == ["1", "1", "2", "1", "5"]
    assert page.texts("#two-runs .side header a")[:2] == ["other · Step 4", "finished · Step 8"]
    assert page.texts("#two-runs .side .text")[:2] == [answer_text(0, 4, 0, 0.0), answer_text(0, 8, 0, 1.0)]
    page.one("#two-runs [data-outcome=broken]").click()
    page.wait(lambda: page.texts("#two-runs .pair .outcome") == ["↓ Broken"])
    page.one("#two-runs .pair > header a").click()
    page.wait(lambda: page.text("main h1") == "Prompt 1 over steps")
    page.wait(lambda: len(page.texts(".column .answer-text")) == 4)
    assert page.texts(".column > header b") == ["runs/other", "runs/finished"]
    assert page.texts(".column > header h2") == ["Step 4", "Step 8"]
    assert page.texts(".column .answer-text")[2] == answer_text(1, 8, 0, 0.0)


def test_a_text_is_found_in_the_answers_of_all_steps(page: Page) -> None:
    page.open("finished/search")
    page.press("/", "answer 2: let me think about question 10", Keys.ENTER)
    page.wait(lambda: page.text("#searched") == "4 answers in 8 steps, all of them")
    assert page.texts(".pair h2") == ["Step 7", "Step 5", "Step 3", "Step 1"]
    assert page.texts("mark") == ["answer 2: let me think about question 10"] * 4
    assert page.texts(".found header a")[0] == "Prompt 4, answer 3"
    page.open("finished/search?text=let%20me%20think")  # in every answer: the user is asked whether to go on
    page.wait(lambda: page.text("#searched") == "120 answers in 5 steps; 3 steps are left")
    page.one("#search-more").click()
    page.wait(lambda: page.text("#searched") == "192 answers in 8 steps, all of them")
    page.open("finished/search?text=%3Cb%3Enowhere")
    page.wait(lambda: page.texts(".empty h2") == ["No answer contains it"])
