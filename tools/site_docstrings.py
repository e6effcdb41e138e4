"""Docstrings of torch/cadre as Markdown, for the site: what begins with the name of an argument, or
with a word such as Errors, and a colon becomes an item of a list. mkdocs.yml names this file."""
import re

import griffe

LABEL = re.compile(r"((?:\w+, )*\w+):\s+")
BRACKET = re.compile(r"\[(?=[^`]*(?:`[^`]*`[^`]*)*$)")  # that is no code: no link either


def markdown(text):
    """A docstring as Markdown: blocks of code, which are indented, stay as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else paragraph(part) for part in parts)


def paragraph(text):
    """Lines that go on with an item are indented; where none is, only a label ends an item."""
    lines = BRACKET.sub(r"\\[", text).split("\n")
    hanging = any(line.startswith(" ") for line in lines)
    out, in_item = [], False
    for line in lines:
        label = LABEL.match(line)
        if label:
            names = ", ".join(f"`{name}`" for name in label[1].split(", "))
            line = ("" if in_item else "\n") + f"- **{names}**: {line[label.end():]}"
        elif in_item and not line.startswith(" "):
            line = f"\n{line}" if hanging else f"    {line}"
        in_item = bool(label) or in_item and line.startswith(" ")
        out.append(line)
    return "\n".join(out)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **rest):
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
