import pytest
from jinja2 import Environment

from longstraw.errors import InputError
from longstraw.records import Response
from longstraw.training.data import Row
from longstraw.training.prompts import completion_text, encode_prompt, keep_fitting_rows, prompt_text, stop_ids

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise('no system turn') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if generate %}<assistant>{% endif %}"
)
SPECIAL = {"</>": 200, "<user>": 201, "<assistant>": 202, "<bos>": 203, "<eos>": 204}


class ChatTokenizer:
    """Characters are their code points; tags are single special tokens; text gets a begin token."""

    eos_token_id = 204
    chat_template = TEMPLATE
    all_special_ids = tuple(SPECIAL.values())

    def encode(self, text, *, add_special_tokens, verbose):
        ids = [203] if add_special_tokens else []
        while text:
            tag = next((tag for tag in SPECIAL if text.startswith(tag)), text[0])
            ids.append(SPECIAL.get(tag, ord(tag[0])))
            text = text[len(tag) :]
        return ids

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i < 200)

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt=False, continue_final_message=False):
        environment = Environment()

        def refuse(text):
            from jinja2 import TemplateError

            raise TemplateError(text)

        environment.globals["raise"] = refuse
        text = environment.from_string(self.chat_template).render(messages=conversation, generate=add_generation_prompt)
        return text.removesuffix("</>") if continue_final_message else text


def row(prompt):
    return Row(0, "rows.jsonl line 1", prompt, {})


def chat(*turns):
    return row(tuple({"role": role, "content": content} for role, content in turns))


def test_messages_go_through_the_template_and_open_the_assistants_turn():
    assert prompt_text(ChatTokenizer(), chat(("user", "hi"))) == "<user>hi</><assistant>"
    assert encode_prompt(ChatTokenizer(), chat(("user", "h"))).token_ids.tolist() == [201, ord("h"), 200, 202]


def test_a_last_assistant_message_is_continued():
    assert prompt_text(ChatTokenizer(), chat(("user", "hi"), ("assistant", "So"))) == "<user>hi</><assistant>So"


def test_text_prompts_get_the_tokenizers_own_special_tokens():
    assert encode_prompt(ChatTokenizer(), row("h")).token_ids.tolist() == [203, ord("h")]


def test_a_template_that_refuses_names_the_row():
    with pytest.raises(InputError, match=r"refuses the messages of rows\.jsonl line 1: no system turn"):
        encode_prompt(ChatTokenizer(), chat(("system", "be nice")))


def test_messages_without_a_template_are_refused(fake_tokenizer):
    with pytest.raises(InputError, match="no chat template"):
        encode_prompt(fake_tokenizer, chat(("user", "hi")))


def test_a_response_ends_by_default_with_end_of_text_or_end_of_turn(fake_tokenizer):
    assert stop_ids(ChatTokenizer(), None) == (204, 200)
    assert stop_ids(fake_tokenizer, None) == (10,)


def test_stops_are_ids_or_texts_of_one_token():
    assert stop_ids(ChatTokenizer(), [7, "</>", "x"]) == (7, 200, ord("x"))
    with pytest.raises(InputError, match=r"'xy' is 2 tokens"):
        stop_ids(ChatTokenizer(), ["xy"])


def test_a_tokenizer_without_any_stop_is_refused():
    tokenizer = ChatTokenizer()
    tokenizer.eos_token_id, tokenizer.chat_template = None, None
    with pytest.raises(InputError, match=r"sampling\.stop: the tokenizer names no end-of-text"):
        stop_ids(tokenizer, None)


def test_completions_are_text_without_special_tokens():
    assert completion_text(ChatTokenizer(), Response([ord("h"), 200])) == "h"


def test_a_prompt_beyond_the_limit_is_named_or_left_out():
    rows = [row("a"), Row(1, "rows.jsonl line 2", "b", {})]
    limits = {"max_prompt_tokens": 10, "limit_is": "the model's 16 positions minus 6"}
    with pytest.raises(InputError, match=r"rows\.jsonl line 2 has 11 tokens, the limit is 10 \(the model's 16"):
        keep_fitting_rows(rows, [10, 11], skip_longer=False, **limits)
    assert keep_fitting_rows(rows, [10, 11], skip_longer=True, **limits) == rows[:1]
    with pytest.raises(InputError, match="every prompt is longer than 10"):
        keep_fitting_rows(rows, [11, 11], skip_longer=True, **limits)
