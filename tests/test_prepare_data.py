"""The indexed dataset made from text: what is in it, in what order, and that Megatron reads it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_cp_plugin.harness import prepare_data


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "second.txt").write_text("naïve\n")
    (folder / "a.py").write_text("print()\n")
    (folder / "c.md").write_bytes(bytes(range(256)))
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"not text")
    return folder


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    ends = np.append(dataset.document_indices[1:], len(dataset))
    assert ends[-1] == len(dataset)
    return [dataset[index].tolist() for index in range(len(dataset))]


def test_documents_are_the_files_by_name(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "out" / "corpus.v2"
    assert prepare_data.main([str(corpus), "--output", str(prefix)]) == 0
    assert documents(prefix) == [
        [*b"print()\n", 256],
        [*"naïve\n".encode(), 256],
        [*range(256), 256],
    ]
    assert f"3 documents, {9 + 8 + 257} tokens" in capsys.readouterr().out
    # Nothing but the dataset is left.
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "corpus.v2.bin",
        "corpus.v2.idx",
    ]


def test_files_are_cut_into_documents(corpus: Path, tmp_path: Path) -> None:
    words = [str(corpus), "--output", str(tmp_path / "x")]
    assert prepare_data.main(words) == 0
    assert prepare_data.main([*words, "--document-bytes", "100"]) == 0
    assert [len(document) for document in documents(tmp_path / "x")] == [9, 8, 101, 101, 57]
    assert b"".join(bytes(d[:-1]) for d in documents(tmp_path / "x")[2:]) == bytes(range(256))


@pytest.mark.parametrize(
    ("name", "words"), [("nope", "no such file or folder"), ("corpus/b/none", "no text file")]
)
def test_bad_input_is_one_line(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    (corpus / "b" / "none").mkdir()
    assert prepare_data.main([str(tmp_path / name), "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.bin").exists()


def test_documents_end_as_megatrons_tokenizer_says() -> None:
    """With the settings that the shipped run files give."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    settings = {"tokenizer_type": "NullTokenizer", "vocab_size": 257, "pad_vocab_size": False}
    assert build_tokenizer(SimpleNamespace(**settings)).eod == prepare_data.END_OF_DOCUMENT
