"""Reads the commands that a shell script would run, without running anything.

Variables, arrays, defaults, whole-number arithmetic, sourced files and conditions on known values
are followed. Any other source of a value, such as the environment, a command or a loop, makes
it unknown; so does a branch if it is not known whether it is taken.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

UNKNOWN = "?"


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        text: With `UNKNOWN` in place of unknown parts.
        place: File and line where it was written.
        known: Whether all of it is.
    """

    text: str
    place: str = ""
    known: bool = True


type Command = list[Word]

_NOT_KNOWN = Word(UNKNOWN, "", False)
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_PREFIXES = ("export", "local", "readonly", "declare", "then", "else", "do", "exec")


def _bracketed(opening: str, closing: str) -> str:
    """A pattern of text in brackets, with further brackets inside."""
    other, inner = rf"[^\{opening}\{closing}]", ""
    for _ in range(6):
        inner = rf"\{opening}(?:{other}{'|' + inner if inner else ''})*+\{closing}"
    return inner


_ROUND, _CURLY = _bracketed("(", ")"), _bracketed("{", "}")
# Parts of words, in double quotes and outside of them.
_QUOTED_PARTS = rf"""\\(?P<escaped>.)
    |\$\((?P<arithmetic>{_ROUND})\)|(?P<command>\${_ROUND}|`[^`]*`)
    |\$(?P<braces>{_CURLY})|\$(?P<name>\w+|[@*\#?])"""
_PARTS = rf"""'(?P<single>[^']*)'
    |"(?P<double>(?:\\.|\${_ROUND}|\${_CURLY}|[^"\\])*+)"|{_QUOTED_PARTS}"""
_FLAGS = re.VERBOSE | re.DOTALL
_QUOTED = re.compile(rf"{_QUOTED_PARTS}|(?P<plain>[^\\`$]+|.)", _FLAGS)
_UNQUOTED = re.compile(rf"{_PARTS}|(?P<plain>[^\\`$'\"]+|.)", _FLAGS)
_TOKEN = re.compile(
    rf"""(?P<nothing>[ \t]|\\\n|\#[^\n]*)
    |<<-?\s*['"]?(?P<document>\w+)['"]?
    |(?P<operator>\n|&&|\|\||;;|[;|&()])
    |(?P<word>(?:{re.sub(r"[?]P<[a-z]+>", "?:", _PARTS)}|[^ \t\n;|&()])++(?:(?<!=)\(\))?)""",
    _FLAGS,
)


def script_commands(path: Path) -> tuple[list[Command], list[str]]:
    """Returns the commands that a script would run, and lines that were not understood."""
    script = _Script(path)
    script.read(path)
    return script.commands, script.problems


@dataclass
class _Script:
    path: Path
    commands: list[Command] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    values: dict[str, list[Word]] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        tokens = list(_words(path.read_text(), path.name))
        self._run(_statements(tokens), path, certain=True)

    def _run(self, statements: Sequence[list[Word]], path: Path, *, certain: bool) -> None:
        """Args: certain: Whether it is known that they run."""
        at = 0
        while at < len(statements):
            words = statements[at]
            first = words[0].text if words else ""
            if first in _OPENS:
                end = _end_of_block(statements, at)
                inner = statements[at + 1 : end]
                if first == "if":
                    self._condition(words[1:], inner, path, certain=certain)
                else:
                    self._run(
                        [_after_pattern(each) for each in (words, *inner)], path, certain=False
                    )
                at = end + 1
                continue
            at += 1
            if first.endswith("()") or first == "function":
                depth = 1
                while at < len(statements) and depth:
                    texts = [word.text for word in statements[at]]
                    depth += texts.count("{") - texts.count("}")
                    at += 1
                continue
            while words and words[0].text in _PREFIXES:
                words = words[1:]
            if words:
                self._statement(words, path, certain=certain)

    def _condition(
        self, test: list[Word], inner: Sequence[list[Word]], path: Path, *, certain: bool
    ) -> None:
        branches: list[tuple[list[Word] | None, list[list[Word]]]] = [(test, [])]
        depth = 0
        for words in inner:
            first = words[0].text
            if not depth and first in ("elif", "else"):
                branches.append((words[1:] if first == "elif" else None, []))
                continue
            depth += (first in _OPENS) - (first in _OPENS.values())
            branches[-1][1].append(words)
        for test_of, body in branches:
            holds = True if test_of is None else self._holds(test_of)
            certain = certain and holds is not None
            if holds is not False:
                self._run(body, path, certain=certain)
            if holds is True:
                return

    def _holds(self, test: list[Word]) -> bool | None:
        """Whether a condition holds; None: nobody knows."""
        words = [part for word in test for part in self._expand(word)]
        if not words or words[0].text not in ("[", "[[", "test"):
            return None
        words = [word for word in words[1:] if word.text not in ("]", "]]")]
        if any(not word.known for word in words):
            return None
        match [word.text for word in words]:
            case ["-z", *rest]:
                return not "".join(rest)
            case ["-n", *rest]:
                return bool("".join(rest))
            case [left, "=" | "==", right]:
                return left == right
            case [left, "!=", right]:
                return left != right
            case [left, sign, right] if sign in _NUMBERS:
                found = _arithmetic(f"({left}) {_NUMBERS[sign]} ({right})")
                return None if found is None else bool(found)
        return None

    def _statement(self, words: list[Word], path: Path, *, certain: bool) -> None:
        found = _ASSIGNMENT.fullmatch(words[0].text)
        if found and len(words) > 1 and words[1].text == "(" and not found[3]:
            inside = [part for word in words[2:-1] for part in self._expand(word)]
            self._assign(found[1], found[2], inside, certain=certain)
        elif all(_ASSIGNMENT.fullmatch(word.text) for word in words):
            for word in words:
                name, plus, raw = _ASSIGNMENT.fullmatch(word.text).groups()  # type: ignore[union-attr]
                parts = self._expand(Word(raw, word.place), quoted=_is_plain(raw))
                self._assign(name, plus, [_joined_words(parts, " ", word.place)], certain=certain)
        elif words[0].text in ("source", ".") and len(words) > 1:
            self._source("".join(part.text for part in self._expand(words[1])), words[1], path)
        elif words[0].text == "printf" and len(words) > 2 and words[1].text == "-v":
            self._assign(words[2].text, "", [Word(UNKNOWN, words[2].place, False)], certain=True)
        else:
            self.commands.append([part for word in words for part in self._expand(word)])

    def _assign(self, name: str, plus: str, words: list[Word], *, certain: bool) -> None:
        if not certain:
            words = [Word(UNKNOWN, word.place, False) for word in words]
        if plus:
            words = [*self.values.get(name, []), *words]
        self.values[name] = words

    def _source(self, text: str, word: Word, path: Path) -> None:
        """Reads a file whose folder may be unknown, or another machine's."""
        parts = Path(text.replace(UNKNOWN, "/")).parts
        tails = (Path(*parts[at:]) for at in range(1 if parts[:1] == ("/",) else 0, len(parts)))
        folders = (path.parent, *path.parent.resolve().parents)
        for tail in tails:
            for folder in folders:
                if (folder / tail).is_file():
                    self.read(folder / tail)
                    return
        self.problems.append(f"{word.place}: source {text}: no such file here")

    def _expand(self, word: Word, *, quoted: bool = False) -> list[Word]:
        """The words that one becomes. Args: quoted: whether it is in double quotes."""
        texts: list[list[Word]] = [[]]
        for part in (_QUOTED if quoted else _UNQUOTED).finditer(word.text):
            kind = part.lastgroup or ""
            found, as_it_is = self._meant(kind, part[kind], word)
            if quoted and not as_it_is:
                found = [_joined_words(found, " ", word.place)]
            elif not as_it_is:
                found = [replace(one, text=part) for one in found for part in one.text.split()]
            for number, one in enumerate(found):
                if number:
                    texts.append([])
                texts[-1].append(one)
        return [
            _joined_words(parts, "", next((part.place for part in parts if part.place), word.place))
            for parts in texts
            if parts
        ]

    def _meant(self, kind: str, text: str, word: Word) -> tuple[list[Word], bool]:
        """The text for a part of a word, and whether its words stay as they are."""
        match kind:
            case "double" if text:
                return self._expand(replace(word, text=text), quoted=True), True
            case "arithmetic":
                named = re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", text)
                words = self._expand(Word(named))
                inside = " ".join(word.text for word in words)
                value = _arithmetic(inside) if all(word.known for word in words) else None
                return [_NOT_KNOWN if value is None else Word(str(int(value)))], False
            case "command":
                return [_NOT_KNOWN], False
            case "braces":
                found = re.fullmatch(r"{(\w+)(?:\[([@*])\])?(?::?([-=?+])(.*))?}", text, re.DOTALL)
                if not found:
                    return [_NOT_KNOWN], False
                name, every, sign, other = found.groups()
                if sign in ("-", "=") and not "".join(w.text for w in self.values.get(name, [])):
                    return self._expand(Word(other), quoted=_is_plain(other)), False
                if every and name not in self.values:
                    return [], True  # the environment has no arrays
                return self._value(name), every is not None
            case "name":
                return ([], True) if text in "@*" else (self._value(text), False)
        return [Word(text, word.place)], True

    def _value(self, name: str) -> list[Word]:
        return self.values.get(name, [_NOT_KNOWN])


def _after_pattern(words: list[Word]) -> list[Word]:
    """A statement of a loop or a case, without the text before it on its line."""
    texts = [word.text for word in words]
    if texts[:1] == ["case"] or (")" in texts and "(" not in texts):
        return words[texts.index(")") + 1 :] if ")" in texts else []
    return [] if texts and texts[0] in _OPENS else words


def _joined_words(parts: Sequence[Word], between: str, place: str) -> Word:
    text = between.join(part.text for part in parts)
    return Word(text, place, all(part.known for part in parts))


def _is_plain(raw: str) -> bool:
    return not {'"', "'"} & {*raw}


def _arithmetic(text: str) -> float | None:
    """The value of whole numbers and + - * / % with comparisons; None: it is something else."""
    signs = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.cmpop)
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Compare, *signs)
    try:
        tree = ast.parse(text.strip().replace("/", "//"), mode="eval")
        if not all(isinstance(node, allowed) for node in ast.walk(tree)):
            return None
        value = eval(compile(tree, "", "eval"), {"__builtins__": {}})  # numbers alone
    except (SyntaxError, ValueError, ArithmeticError, TypeError):
        return None
    return value if isinstance(value, int) else None


def _words(text: str, name: str) -> Iterator[Word]:
    """Words with their quotes, brackets of arrays, and operators, of which one ends a line."""
    at, line = 0, 1
    pending: list[str] = []  # ends of documents that follow
    while found := _TOKEN.match(text, at):
        at, place = found.end(), f"{name}:{line}"
        if found["document"]:
            pending.append(found["document"])
        elif found["word"] or found["operator"]:
            yield Word(found[0].replace("\\\n", ""), place)
        if found[0] == "\n":
            for last in pending:
                document = re.compile(rf".*?^\s*{re.escape(last)}\s*$", re.S | re.M)
                passed = document.match(text, at)
                at = passed.end() if passed else len(text)
            pending = []
        line += text.count("\n", found.start(), at)


def _statements(tokens: Sequence[Word]) -> list[list[Word]]:
    """Tokens by statement; an array's brackets and lines are in one, then, else and do alone."""
    found: list[list[Word]] = [[]]
    depth = 0
    for token in tokens:
        depth = max(0, depth + (token.text == "(") - (token.text == ")"))
        if token.text in _OPERATORS and not depth:
            found.append([])
        elif token.text != "\n":
            found[-1].append(token)
            if len(found[-1]) == 1 and token.text in ("then", "else", "do"):
                found.append([])
    return [words for words in found if words]


def _end_of_block(statements: Sequence[list[Word]], at: int) -> int:
    """Which statement ends one that begins with if, for, while or case."""
    depth = 0
    for number in range(at, len(statements)):
        first = statements[number][0].text
        depth += (first in _OPENS) - (first in _OPENS.values())
        if not depth:
            return number
    return len(statements) - 1
