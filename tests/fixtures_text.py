"""Tiny real tokenizer (TOK) and the chat templates that trip other tools, as `shared/cases` describes them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

START, END, PAD, EOS = "<|im_start|>", "<|im_end|>", "<pad>", "<|endoftext|>"
SPECIALS = (EOS, START, END, PAD)
ORDINARY = 396
VOCAB_SIZE = ORDINARY + len(SPECIALS)  # 400; the specials have the last ids, as in Qwen's tokenizers

TEXT = """
The harbour was quiet in the morning. A small boat came in with the tide, and the woman at the wheel waved to
the man on the pier. He asked her what she had seen out there. She said that the water was cold and clear,
that the wind had turned to the north, and that there were more birds than in any other year. He wrote the
numbers down: 12, 40, 7 and 365. When the question is short, the answer can be short as well. When the
question is long, the answer should be careful, and every step should be shown: first the number, then the
reason, then the result. A list of words is not an answer.
def add(first, second): return first + second
for number in range(10): print(number, add(number, 1))
"""

_HEAD = "<|im_start|>{{ m['role'] }}{{ '\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_TURN = _HEAD + "{{ m['content'] }}<|im_end|>{{ '\\n' }}"
_LOOP = "{% for m in messages %}" + _TURN + "{% endfor %}"

T_PLAIN = _LOOP + _PROMPT
T_GEN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    + _HEAD
    + "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _PROMPT
)
T_STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant, from user') }}{% endif %}"
    + _TURN
    + "{% endfor %}"
    + _PROMPT
)
_STRIPPED = "{{ m['content'].split('</think>')[-1].lstrip('\\n') }}"
_STUB_OFF = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"


def _thinking(last: str, prompt: str) -> str:
    """A template that strips think text from answers before `last` (a Jinja condition on the messages)."""
    return (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if "
        + last
        + " %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}{% for m in messages %}"
        + _HEAD
        + "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
        + _STRIPPED
        + "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{{ '\\n' }}{% endfor %}"
        + prompt
    )


_THINK_PROMPT = _PROMPT.replace("{% endif %}", _STUB_OFF + "{% endif %}")
T_THINK = _thinking("m['role'] == 'user'", _THINK_PROMPT)  # as Qwen3: answers before the last question
T_THINK_LAST = _thinking("m['role'] == 'assistant'", _THINK_PROMPT)  # all but the last answer, to the letter
# as DeepSeek-R1 and Qwen3.5: the generation prompt opens the think block, no answer shows it
T_STUB = _LOOP.replace("{{ m['content'] }}", _STRIPPED) + _PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
T_CLOSE = _LOOP + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}" + _PROMPT
T_SYS = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}" + T_PLAIN
)
T_TOOL = "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}" + T_PLAIN
T_BARE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ '\\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
T_PARTS = T_PLAIN.replace(
    "{{ m['content'] }}",
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}",
)


def make_tokenizer(
    template: str | dict[str, str] | None = T_PLAIN, *, think_tokens: bool = False
) -> PreTrainedTokenizerFast:
    """TOK: byte-level BPE of 400 ids; `think_tokens` adds <think> and </think> as tokens of their own (402 ids)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ORDINARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if think_tokens:
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, additional_special_tokens=[START, END]
    )
    assert len(made) == VOCAB_SIZE + 2 * think_tokens
    made.chat_template = template
    return made


def save_tokenizer(
    folder: Path,
    template: str | dict[str, str] | None = T_PLAIN,
    *,
    end_ids: int | list[int] | None = None,
    think_tokens: bool = False,
) -> Path:
    """Save TOK into `folder`, beside what is there; `end_ids` go into generation_config.json (TOK-2eos: two)."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(template, think_tokens=think_tokens).save_pretrained(folder)
    if end_ids is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    return folder


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages that alternate from user."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return opening + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
