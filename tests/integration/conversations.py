"""Conversations to fine-tune on, without a download."""

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(120)]
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' </s> ' }}{% endfor %}"
# Stands for the package of that name, of which Megatron needs one function.
DATASETS = """
import json


def load_dataset(kind, data_files, split):
    with open(data_files) as lines:
        return [json.loads(line) for line in lines]
"""


def write_conversations(folder: Path) -> None:
    """Of 8, 16 or 24 tokens, several to a line of data.jsonl; their tokenizer; and a package that
    reads them, for a script beside it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)

    def conversation() -> list[dict[str, str]]:
        tokens = 8 * rng.randrange(1, 4)
        words = [2, 1, tokens - 6]  # and one after each turn
        return [
            {"role": role, "content": " ".join(rng.choices(WORDS, k=count))}
            for role, count in zip(("system", "user", "assistant"), words, strict=True)
        ]

    lines = [
        json.dumps({"messages": [turn for _ in range(count) for turn in conversation()]})
        for count in rng.choices(range(1, 6), k=40)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines))
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<unk>", "</s>", *WORDS))}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "datasets.py").write_text(DATASETS)
