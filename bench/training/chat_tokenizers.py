"""Tokenizers with chat templates, made on the spot: ChatML without and with marks, and one like Llama 3's."""

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. Answer: yes, no, or maybe.\n\nThe user asks, the assistant answers.",
    "yes\n\nno\n\nmaybe\n\nyes\n\nno\n\nmaybe\n\n",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen's and many others', which mark nothing."""

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text."""

LLAMA = (
    "{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

LLAMA_MARKED = (
    "{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""The same text."""

FORGETFUL = CHATML.replace(
    "message['content'] +", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +"
)
"""Leaves out what was thought in earlier turns, as Qwen 3's does."""


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's and Qwen's: line ends are one token, whatever follows."""


@cache
def make(template: str | None = CHATML, *, begins: bool = False, more: tuple[str, ...] = ()) -> Any:
    """A byte-level BPE; `begins`: it puts a token before each text, as Llama's does. `more` special tokens."""
    special = [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>", *more,
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 10, trainer)
    if begins:
        pair = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[pair])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eot_id|>" if begins else "<|endoftext|>",
        bos_token="<|begin|>" if begins else None, pad_token="<|endoftext|>", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = template
    return made


@cache
def llama() -> Any:
    """Llama 3's way."""
    return make(LLAMA, begins=True)
