"""Reads C++ well enough to find its functions, variables and templates with their lines.

No parser: comments and strings are blanked, the rest is cut into tokens, and braces are classified
by the statement before them. Macros are not expanded. That is enough for code in the style of
STYLE.md, and it needs nothing but Python.
"""
import dataclasses
import re

TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.']*|::|->|&&|\|\||<=|>=|==|!=|<<|[^\s\w]")
NOT_A_NAME = {"alignas", "decltype", "noexcept", "requires", "__attribute__", "explicit", "sizeof",
              "__launch_bounds__", "__declspec", "defined"}
NO_VARIABLE = {"using", "typedef", "static_assert", "friend", "namespace", "concept", "enum"}
HIDDEN = re.compile(r"//|/\*|[\"']")  # what a comment or a literal begins with
CLOSER = {"(": ")", "[": "]", "{": "}"}


@dataclasses.dataclass
class Function:
    """A declaration (`body` is empty, `end` the last line of the signature) or a definition."""
    name: str
    start: int
    open: int
    end: int
    parameters: int
    words: list
    body: list


@dataclasses.dataclass
class Variable:
    """A variable that outlives a call: of a namespace, a static member, a static in a function."""
    name: str
    line: int
    mutable: bool


@dataclasses.dataclass
class Template:
    line: int
    parameters: int


class Source:
    """`code` is the text without comments and string contents, line for line; `comments` are
    (line, text); `directives` are the preprocessor lines (line, text)."""

    def __init__(self, text):
        self.lines = text.split("\n")
        blanked, self.comments = blank(text)
        self.code, self.directives = split_directives(blanked)
        self.tokens = [(m.group(), number) for number, line in enumerate(self.code, 1)
                       for m in TOKEN.finditer(line)]
        self.functions, self.variables, self.templates = [], [], []
        Walker(self).walk()


def literal_end(text, i):
    """The index behind the string, character or raw string literal that starts at i."""
    if text[i] == '"' and i and text[i - 1] == "R":
        mark = text[i + 1:text.index("(", i)]
        return text.index(f'){mark}"', i) + len(mark) + 2
    j = i + 1
    while j < len(text) and text[j] != text[i] and text[j] != "\n":
        j += 2 if text[j] == "\\" else 1
    return min(j + 1, len(text))


def blank(text):
    """`text` with comments and the insides of literals turned into spaces; and the comments."""
    out, comments, i = [], [], 0
    hide = lambda part: re.sub(r"[^\n]", " ", part)
    while match := HIDDEN.search(text, i):
        out.append(text[i:match.start()])
        i = match.start()
        if text.startswith("//", i):
            j = text.find("\n", i)
            j = len(text) if j < 0 else j
            comments.append((text.count("\n", 0, i) + 1, text[i:j]))
            out.append(hide(text[i:j]))
        elif text.startswith("/*", i):
            j = text.find("*/", i + 2)
            j = len(text) if j < 0 else j + 2
            comments.append((text.count("\n", 0, i) + 1, text[i:j]))
            out.append(hide(text[i:j]))
        elif text[i] == '"' or (text[i] == "'" and not (i and text[i - 1].isalnum())):
            j = literal_end(text, i)
            out.append(text[i] + hide(text[i + 1:j - 1]) + text[i] if j - i > 1 else text[i])
        else:
            j = i + 1
            out.append(text[i])
        i = j
    return "".join(out) + text[i:], comments


def split_directives(blanked):
    """The lines with preprocessor directives emptied, and those directives with their lines."""
    code, directives, inside = [], [], False
    for number, line in enumerate(blanked.split("\n"), 1):
        if inside or line.lstrip().startswith("#"):
            directives.append((number, line))
            inside = line.rstrip().endswith("\\")
            line = ""
        code.append(line)
    return code, directives


def group_end(tokens, i):
    """The index behind the bracket that closes the one at i."""
    depth, first = 0, tokens[i][0]
    for j in range(i, len(tokens)):
        depth += (tokens[j][0] == first) - (tokens[j][0] == CLOSER[first])
        if depth == 0:
            return j + 1
    return len(tokens)


def angle_end(words, i):
    """The index behind the `>` that closes the `<` at i, brackets skipped."""
    depth, round_ = 0, 0
    for j in range(i, len(words)):
        round_ += (words[j] in "([{") - (words[j] in ")]}")
        if round_ == 0:
            depth += (words[j] == "<") - (words[j] == ">")
        if depth == 0:
            return j + 1
    return len(words)


def count_items(words):
    """Comma-separated items at depth 0."""
    if not words or words == ["void"]:
        return 0
    depth, commas = 0, 0
    for w in words:
        depth += (w in ("(", "[", "{", "<")) - (w in (")", "]", "}", ">"))
        commas += w == "," and depth == 0
    return commas + 1


def name_position(words):
    """The index of the `(` of a function's parameter list in a declaration, or None."""
    i = 0
    while i < len(words):
        if words[i] == "operator":
            i += 1 if words[i + 1:i + 3] != ["(", ")"] else 3
            while i < len(words) and words[i] != "(":
                i += 1
            return i if i < len(words) else None
        if words[i] == "<":
            i = angle_end(words, i)
        elif words[i] == "(":
            if i and re.match(r"[A-Za-z_]", words[i - 1]) and words[i - 1] not in NOT_A_NAME:
                return i
            i = group_end([(w, 0) for w in words], i)
        elif words[i] == "=":
            return None
        else:
            i += 1
    return None


def without_arguments(words):
    """`words` up to the initialiser, without template arguments: `const std::array < > kName`."""
    out, i = [], 0
    while i < len(words) and words[i] not in ("=", "{", "["):
        out.append(words[i])
        i = angle_end(words, i) if words[i] == "<" else i + 1
    return out


def is_mutable(words):
    """Whether a variable declared by these words can change; `const char*` can."""
    words = without_arguments(words)
    if "constexpr" in words:
        return False
    return "const" not in words or "*" in words[len(words) - words[::-1].index("const"):]


class Walker:
    def __init__(self, source):
        self.source, self.tokens = source, source.tokens
        self.scopes, self.statement = ["namespace"], []

    def walk(self):
        i = 0
        while i < len(self.tokens):
            word = self.tokens[i][0]
            if word in "([":
                end = group_end(self.tokens, i)
                self.statement += self.tokens[i:end]
                i = end
            elif word == "{":
                i = self.open_brace(i)
            elif word == "}":
                self.close_scope()
                i += 1
            elif word == ";":
                self.end_statement()
                i += 1
            else:
                self.statement.append(self.tokens[i])
                if word == ":" and self.words()[-2:-1] in (["public"], ["private"], ["protected"]):
                    self.statement = []
                i += 1

    def words(self):
        return [word for word, _ in self.statement]

    def open_brace(self, i):
        end = group_end(self.tokens, i)
        words = self.untemplated()
        paren = name_position(words)
        if "namespace" in words or words[:1] == ["extern"] and paren is None and "=" not in words:
            self.scopes.append("namespace")
            self.statement = []
            return i + 1
        before = next((k for k, w in enumerate(words) if w in ("struct", "class", "union")), None)
        if "enum" not in words and before is not None and (paren is None or before < paren):
            self.scopes.append("class")
            self.statement = []
            return i + 1
        if paren is not None and not self.is_member_initialiser(words, paren):
            self.add_function(words, paren, i, end)
            self.statement = []
            return end
        self.statement += self.tokens[i:end]
        return end

    def is_member_initialiser(self, words, paren):
        """`Foo(int a) : a_{a} {`: the first brace initialises, the second is the body."""
        rest = words[group_end([(w, 0) for w in words], paren):]
        return ":" in rest and (re.match(r"\w", words[-1]) or words[-1] == ">")

    def close_scope(self):
        closed = self.scopes.pop() if len(self.scopes) > 1 else "namespace"
        line = self.tokens[0][1]
        self.statement = [("<class>", line)] if closed == "class" else []

    def untemplated(self):
        """The words of the statement without `template <...>`, each of which is recorded."""
        words = self.words()
        while words[:1] == ["template"] and words[1:2] == ["<"]:
            end = angle_end(words, 1)
            found = Template(self.statement[len(self.statement) - len(words)][1],
                             count_items(words[2:end - 1]))
            if found not in self.source.templates:
                self.source.templates.append(found)
            words = words[end:]
            if words[:1] == ["requires"] and words[1:2] == ["("]:
                words = words[group_end([(w, 0) for w in words], 1):]
        return words

    def add_function(self, words, paren, open_index, end):
        close = group_end([(w, 0) for w in words], paren)
        name = "operator" if "operator" in words[:paren] else words[paren - 1]
        body = self.tokens[open_index:end]
        last = body[-1][1] if body else self.statement[-1][1]
        opened = body[0][1] if body else last
        self.source.functions.append(Function(
            name, self.statement[0][1], opened, last, count_items(words[paren + 1:close - 1]),
            words, body))
        self.add_local_statics(body)

    def add_local_statics(self, body):
        for i, (word, line) in enumerate(body):
            if word in ("static", "thread_local"):
                stop = next(k for k in range(i, len(body)) if body[k][0] in ";={(}")
                words = [w for w, _ in body[i:stop]]
                self.source.variables.append(Variable(words[-1], line, is_mutable(words)))

    def end_statement(self):
        words = self.untemplated()
        statement, self.statement = self.statement, []
        if not words or words == ["<class>"] or words[0] in NO_VARIABLE or "template" in words[:2]:
            return
        if words[0] in ("struct", "class", "union") and len(words) <= 4:
            return
        paren = name_position(words)
        if paren is not None:
            self.statement = statement
            self.add_function(words, paren, 0, 0)
            self.statement = []
        elif self.scopes[-1] == "namespace" or "static" in words[:2]:
            name = without_arguments(words)[-1]
            self.source.variables.append(Variable(name, statement[0][1], is_mutable(words)))
