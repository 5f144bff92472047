"""The tokens and targets that frugal makes of rows, beside those of TRL's SFTTrainer.

    python -m bench.training.rows            # writes bench/results/rows-cpu.json

TRL must be installed (`pip install --no-deps trl`); it is no dependency of frugal. Each format is prepared by both,
with a ChatML tokenizer and one like Llama 3's. Then every chat template that TRL has marked for training comes twice:
as it is marked, and as its model has it, where frugal finds the assistant's tokens by rendering turn by turn; both are
compared with TRL's own masks of the marked one.
"""

import json
import re
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.environment import environment
from bench.training import chat_tokenizers as tokenizers
from frugal.data.build import SampleSettings
from frugal.data.corpus import load_corpus
from frugal.errors import RequestError

RESULT = Path(__file__).parents[1] / "results" / "rows-cpu.json"
SEQ_LEN = 4096

SYSTEM = {"role": "system", "content": "You are helpful."}
TURNS = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?\n\nAnswer: "},
    {"role": "assistant", "content": "Rome, of course.\n\nIs there more?"},
]
SHAREGPT = [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]
TEXTS = ["The capital of France is Paris.", "yes, no, or maybe\n\n"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": TURNS}, {"messages": [SYSTEM, *TURNS]}, {"messages": TURNS[:2]}],
    "conversations": [{"conversations": SHAREGPT}, {"conversations": SHAREGPT[:2]}],
    "prompt and completion of messages": [
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": [SYSTEM, TURNS[0]], "completion": [TURNS[1]]},
    ],
    "prompt and completion of text": [
        {"prompt": "What is the capital?", "completion": " Paris."},
        {"prompt": "Answer: ", "completion": "yes"},
        {"prompt": "What is the cap", "completion": "ital of France?"},
    ],
    "token ids with labels": [{"input_ids": [9, 8, 7, 6], "labels": [-100, 8, -100, 6]}],
    "text": [{"text": text} for text in TEXTS],
}

Prepared = list[tuple[list[int], list[int]]]
"""Tokens and labels of each sample."""


def of_trl(rows: list[dict[str, Any]], tokenizer: Any, *, assistant_only: bool) -> Prepared:
    """Return what SFTTrainer trains on."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # installed for this alone

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with tempfile.TemporaryDirectory() as folder:
        asked = SFTConfig(
            output_dir=folder, assistant_only_loss=assistant_only, max_length=SEQ_LEN, report_to=[], use_cpu=True,
            bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config), args=asked, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        return [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]


def of_frugal(rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> Prepared:
    """Return what frugal trains on.

    Raises:
        RequestError: it refuses them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        corpus = load_corpus(
            [str(path)], tokenizer, SampleSettings(task="causal-lm", seq_len=SEQ_LEN, **options),
            cache_dir=Path(folder, "cache"),
        )  # fmt: skip
        ids = [sample["input_ids"] for sample in corpus.train]
        labels = [sample.get("labels", sample["input_ids"]) for sample in corpus.train]
        return [(i.tolist(), np.asarray(each).tolist()) for i, each in zip(ids, labels, strict=True)]


def formats() -> list[dict[str, Any]]:
    """Return whether both make the same of each format."""
    results = []
    chatml, llama = tokenizers.make(tokenizers.MARKED), tokenizers.llama()
    for name, rows in ROWS.items():
        for kind, tokenizer in (("chatml", chatml), ("llama 3", llama)):
            is_chat = name in ("messages", "conversations")
            if is_chat and kind == "llama 3":
                tokenizer = tokenizers.make(tokenizers.LLAMA_MARKED, begins=True)
            asked = (
                [{"messages": TURNS[: len(row["conversations"])]} for row in rows]
                if "conversations" in rows[0]
                else rows
            )
            theirs = of_trl(asked, tokenizer, assistant_only=is_chat)  # it masks no ShareGPT rows
            results.append({"format": name, "template": kind, "same": of_frugal(rows, tokenizer) == theirs})
            if is_chat:
                all_tokens = of_frugal(rows, tokenizer, train_on="all") == of_trl(rows, tokenizer, assistant_only=False)
                results.append({"format": f"{name}, every token", "template": kind, "same": all_tokens})
    return results


def template(plain: Path, marked: Path) -> dict[str, Any]:
    """One of TRL's templates, unmarked and marked, against TRL's masks of the marked one."""
    text = plain.read_text()
    special = tuple(
        sorted(
            {
                *re.findall(
                    "<[|\uff5c][^|\uff5c<>]+[|\uff5c]>" r"|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?INST\]", text
                )
            }
        )
    )
    made = tokenizers.make(text, begins=True, more=special)
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}]
    result: dict[str, Any] = {"template": plain.stem}
    made.chat_template = marked.read_text()
    try:
        theirs = [of_trl([row], made, assistant_only=True)[0] for row in rows]
    except Exception as error:  # a template may want what no chat of text has
        return result | {"trl": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    for name, chat_template in (("marked", marked.read_text()), ("by rendering", text)):
        made.chat_template = chat_template
        for turns, row, (ids, labels) in zip(("one turn", "two turns"), rows, theirs, strict=True):
            result[f"{name}, {turns}"] = _compared(row, made, ids, labels)
    return result


def _compared(row: dict[str, Any], tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    try:
        ((our_ids, our_labels),) = of_frugal([row], tokenizer)
    except RequestError as error:
        return f"refused: {str(error).splitlines()[0]}"
    if our_ids != ids:
        return "other tokens"
    if our_labels == labels:
        return "same"
    ours, theirs = (np.array(each) >= 0 for each in (our_labels, labels))
    more, less = (tokenizer.decode(np.array(ids)[mask]) for mask in (ours & ~theirs, theirs & ~ours))
    return f"trains on {more!r} more, {less!r} less"


def main() -> None:
    """Compare, and keep what came out."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    marked = sorted(folder.glob("*_training.jinja"))
    templates = [template(path.with_name(path.name.replace("_training", "")), path) for path in marked]
    kinds = ("marked, one turn", "marked, two turns", "by rendering, one turn", "by rendering, two turns")
    summary = {
        kind: dict(Counter(each[kind].split(":")[0].split(" '")[0] for each in templates if kind in each))
        for kind in kinds
    }
    result = environment("python -m bench.training.rows")
    result["versions"]["trl"] = version("trl")
    result |= {"formats": formats(), "summary": summary, "templates": templates}
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
