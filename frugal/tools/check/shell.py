"""The commands of a shell script with their words, expanded as bash would do it. Nothing is run.

Followed are quotes, continued lines, here documents, variables, arrays, `${NAME:-default}` and its kin, `$((A / B))`
and `$[A / B]`, `eval`, `read` and `bash -c`. What depends on a command's output, on the script's arguments or on the
environment is unknown: it stays as it is written, with its `$`. Of an `if` that compares what is known, the branch that
is taken is read. Of others all are, and a variable keeps the value that it had before; that of a loop has one if the
loop has one round.

Grammar: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html. bashlex has it all and is under the
GPL; tree-sitter-bash has no expansions, which are most of this (docs/check.md has a comparison).
"""

import operator
import re
from collections.abc import Iterator, Sequence

Variables = dict[str, list[str]]
"""The items of each array; of a variable that is none, its one value."""

_NESTED = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*+\))*+\))*+"
_SUM = rf"\$\(\((?P<sum>{_NESTED})\)\)|\$\[(?P<old_sum>[^\[\]]*)\]"
_COMMAND, _TICKS = rf"\$\((?P<command>{_NESTED})\)", r"`(?P<ticks>[^`]*)`"
_BRACES = r"\$\{(?P<braces>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*+\})*+)\}"
_EXPANSION = re.compile(rf"{_SUM}|{_COMMAND}|{_TICKS}|{_BRACES}|\$(?P<name>[A-Za-z_]\w*)|\$[\d@*#?$!-]", re.DOTALL)
_UNNAMED = re.sub(r"\?P<\w+>", "?:", _EXPANSION.pattern)
_DOUBLE = rf'"(?P<double>(?:\\.|{_UNNAMED}|[^"\\])*+)"?'
_PIECE = re.compile(
    rf"\$?'(?P<single>[^']*)'?|\$?{_DOUBLE}|\\(?P<escaped>.?)|(?P<expansion>{_UNNAMED})|(?P<plain>[<>]\({_NESTED}\)|"
    r"\$|[^\s;&|()<>'\"\\$`]+|`)",
    re.DOTALL,
)
"""A piece of a word: quoted, expanded, or as it is."""

_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`\"\\\n])|(?P<expansion>{_UNNAMED})", re.DOTALL)
_FIELD = re.compile(rf"(?:{_UNNAMED}|\S)+", re.DOTALL)
"""A word of a value, of which what is not known stays together."""

_ARRAY = re.compile(r"\$\{\w+\[@\]\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[1-9]\d*)(?:\[(\d+|@|\*)\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BLANK = r"(?:[ \t\r]|\\[ \t\r]*\n)+"
_BEGINS = {"if", "while", "until", "for", "case", "select"}
_ENDS = {"fi", "done", "esac"}
_DECLARES = {"export", "declare", "local", "readonly", "typeset"}
_WORDS_BEFORE_COMMANDS = {
    *_BEGINS, *_ENDS, *_DECLARES, "then", "else", "elif", "do", "in", "{", "}", "!", "time", "function",
}  # fmt: skip
_MOST_DEEP = 8  # texts that are read as commands, in each other


def commands(text: str, variables: Variables, depth: int = 0) -> Iterator[list[str]]:
    """Yield the words of each command, and fill `variables`. What an unknown variable would add is not known."""
    for words in _Script(text, variables).commands():
        shell = next((i for i, word in enumerate(words[:-2]) if word.rpartition("/")[2] in ("bash", "sh")), None)
        if words[0] == "eval" and depth < _MOST_DEEP:
            yield from commands(" ".join(words[1:]), variables, depth + 1)
        elif shell is not None and re.fullmatch(r"-\w*c", words[shell + 1]) and depth < _MOST_DEEP:
            yield from commands(words[shell + 2], variables, depth + 1)
        else:
            yield words


def _holds(tests: Sequence[Sequence[str]]) -> bool | None:
    """Return whether the one test of an `if` holds; None if there are more, or what it compares is not known."""
    match [word for test in tests for word in test]:
        case ["[" | "[[", left, sign, right, _] if not re.search(r"[$`*?\[]", left + right):
            if left.isdecimal() and right.isdecimal() and re.fullmatch("-(eq|ne|lt|le|gt|ge)", sign):
                return bool(getattr(operator, sign[1:])(int(left), int(right)))
            return {"=": left == right, "==": left == right, "!=": left != right}.get(sign)
    return None


class _Script:
    """A reader of a text from the place `at` on."""

    def __init__(self, text: str, variables: Variables) -> None:
        self.text, self.variables, self.at = text, variables, 0
        self.branches: list[list[bool | None]] = []  # of each that is open: which are taken; None where it is not known
        self.tests: list[list[str]] = []  # commands since the last `if` or `elif`
        self.documents: list[tuple[str, bool]] = []  # here documents that begin behind this line, and if they expand
        self.reads = ""  # the variable that takes the next of them

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without those that begin branches and loops."""
        words: list[str] = []
        while self.at < len(self.text):
            if self._match(_BLANK) or self._match(r"#[^\n]*"):
                continue
            if redirected := self._match(r"&>>?|\d*(?:<<<|<<-?|>>|>&|<&|>\||[<>](?!\())"):
                self._redirect(redirected, words)
            elif end := self._match(r"\n|[;&|()]"):
                if words and not self._is_in_branch(taken=False):
                    yield words
                self.tests.append(words)
                words = []
                if end == "\n":
                    self._skip_documents()
            elif not words and (assigned := _ASSIGNED.match(self.text, self.at)):
                self._assign(assigned)
            else:
                begin = self.at
                words = self._begun([*words, *self._word()])
                self.at += self.at == begin  # what begins nothing, as a `>(` without its end
        if words and not self._is_in_branch(taken=False):
            yield words

    def _match(self, pattern: str) -> str:
        match = re.compile(pattern).match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def _begun(self, words: list[str]) -> list[str]:
        """Return the words of a command so far, without what only leads to it."""
        if len(words) != 1 or words[0] not in _WORDS_BEFORE_COMMANDS:
            return words
        self._branch(words[0])
        self._match(rf"(?:{_BLANK}-\w+)+")  # of `declare -a`
        if words[0] == "for" and (loop := self._match(r"\s*[A-Za-z_]\w*\s+in\b")):
            items = self._list(_BLANK)
            self.variables.pop(name := loop.split()[0], None)
            if len(items) == 1:
                self.variables[name] = items
        return []

    def _branch(self, word: str) -> None:
        """Open or close a branch, or begin the next of an `if`."""
        self.branches += [[] if word == "if" else [None]] * (word in _BEGINS)
        if word in ("then", "else") and self.branches:
            taken, holds = self.branches[-1], word == "else" or _holds(self.tests)
            taken.append(False if True in taken else None if None in taken and holds else holds)
        self.tests = [] if word in ("if", "elif") else [*self.tests, [word]]
        del self.branches[len(self.branches) - (word in _ENDS) :]

    def _is_in_branch(self, *, taken: bool | None) -> bool:
        return any(each[-1:] == [taken] for each in self.branches)

    def _list(self, between: str) -> list[str]:
        """Return the words up to where none follows; `between` is a pattern of what is between two."""
        items: list[str] = []
        while True:
            self._match(between)
            begin = self.at
            items += self._word()
            if self.at == begin:
                return items

    def _assign(self, assigned: re.Match[str]) -> None:
        name, adds = assigned[1], bool(assigned[2])
        self.at = assigned.end()
        before = self.variables.get(name, [])
        if self._match(r"\("):
            value = before * adds + self._list(r"(?:\s|\\[ \t]*\n|(?<=\s)#[^\n]*\n)+")
            self._match(r"\)")
        else:  # the first item stands for all
            value = ["".join(before[:1]) * adds + " ".join(self._word(splits=False)), *before[1:]]
        # in a branch that may not be taken, only what has no value gets one, as in `if [ -z "$N" ]; then N=8`
        is_open = not any(before) or (
            "$" in (text := " ".join(before)) and any(text in " ".join(t) for t in self.tests)
        )
        if (adds or is_open or not self._is_in_branch(taken=None)) and not self._is_in_branch(taken=False):
            self.variables[name] = value

    def _redirect(self, operator: str, words: list[str]) -> None:
        self._match(r"[ \t]+")
        begin = self.at
        target = " ".join(self._word(splits=False))
        is_document = operator.lstrip("0123456789") in ("<<", "<<-")
        if is_document:
            self.documents.append((target, not set("'\"\\") & set(self.text[begin : self.at])))
        if words[:1] != ["read"]:
            return
        names = [word for word in words[1:] if _NAME.fullmatch(word)]
        if len(names) != 1:  # which word of the line each takes is not followed
            for name in names:
                self.variables.pop(name, None)
        elif is_document:
            self.reads = names[0]
        elif operator.endswith("<<<"):
            self.variables[names[0]] = [target]

    def _skip_documents(self) -> None:
        """Go behind the here documents that began in the line before; `read` takes one as its variable's value."""
        for mark, expands in self.documents:
            end = re.compile(rf"^\t*{re.escape(mark)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            body = self.text[self.at : end.start() if end else len(self.text)]
            self.at = end.end() if end else len(self.text)
            if self.reads:
                self.variables[self.reads] = [self._plain(body.replace("\\\n", " ")) if expands else body]
        self.documents, self.reads = [], ""

    def _word(self, *, splits: bool = True) -> list[str]:
        """Return the words that the next one becomes: expansions outside of quotes are split at white space."""
        made, is_quoted = [""], False
        while piece := _PIECE.match(self.text, self.at):
            self.at = piece.end()
            kind, text = piece.lastgroup or "", piece[piece.lastgroup or 0]
            parts = [text.replace("\n", "") if kind == "escaped" else text]
            if kind == "double":
                parts = self._inside(text)
            elif kind == "expansion" and (values := self._values(text)) is not None:
                value = " ".join(values)
                parts = _FIELD.findall(value) if splits else [value]
                if splits and value[:1].isspace() and made[-1]:
                    made.append("")
            is_quoted |= kind == "single" or (kind == "double" and bool(parts))
            made[-1] += "".join(parts[:1])
            made += parts[1:]
        return made if made != [""] or is_quoted or not splits else []

    def _inside(self, text: str) -> list[str]:
        """Return what a text is between double quotes: one text, or those of an array `"${A[@]}"`, also none."""
        if text and not _ARRAY.sub(lambda each: "" if self._values(each[0]) == [] else each[0], text):
            return []
        made, at = [""], 0
        for each in _IN_QUOTES.finditer(text):
            made[-1] += text[at : each.start()]
            at, values = each.end(), [(each["escaped"] or "").replace("\n", "")]
            if each["expansion"]:
                values = self._values(each[0]) or ([each[0]] if self._values(each[0]) is None else [""])
                values = values if _ARRAY.fullmatch(each[0]) else [" ".join(values)]
            made[-1] += values[0]
            made += values[1:]
        made[-1] += text[at:]
        return made

    def _values(self, expansion: str) -> list[str] | None:
        """Return the values of what begins with `$` or a backtick; None where they are not known."""
        match = _EXPANSION.fullmatch(expansion)
        assert match is not None
        kind, body = match.lastgroup or "", match[match.lastgroup or 0]
        if kind in ("sum", "old_sum"):
            value = self._arithmetic(body)
            return None if value is None else [value]
        if kind == "name" and body in self.variables:
            return ["".join(self.variables[body][:1])]
        return self._parameter(body) if kind == "braces" else None

    def _plain(self, text: str) -> str:
        return " ".join(self._inside(text))

    def _parameter(self, body: str) -> list[str] | None:
        match = _PARAMETER.fullmatch(body)
        if match is None:
            return None
        counts, name, index, operator, word = match.groups()
        value = self.variables.get(name)
        if value is not None and index not in ("@", "*"):
            value = value[int(index or 0) : int(index or 0) + 1]
        if counts and value is not None:
            return [str(len(value) if index in ("@", "*") else len("".join(value)))]
        is_set = value is not None and (any(value) or not (operator or "").startswith(":"))
        if operator and operator.endswith("+"):
            return [self._plain(word) if is_set else ""]
        if is_set or not operator or counts:
            return value
        default = self._plain(word)
        if operator.endswith("="):
            self.variables[name] = [default]
        return [default]

    def _arithmetic(self, formula: str) -> str | None:
        """Return the value of a formula of whole numbers; None where one of them is not known."""
        plain = _NAME.sub(lambda name: " ".join(self.variables.get(name[0], [name[0]])), self._plain(formula))
        if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", plain) or "**" in plain:
            return None
        try:
            return str(eval(re.sub(r"/", "//", plain)))  # digits and operators alone
        except (SyntaxError, ArithmeticError, TypeError):
            return None
