"""Tables of tools/docs.py that list what the sources declare."""
import ast
import re

from docs_table import TOP, code, markdown


def link(path, text):  # to a file of the repository, from a page of docs/
    return f"[{text}](../{path.relative_to(TOP).as_posix()})"


def headers(info):
    """The public headers and the types that they declare."""
    rows = []
    for path in sorted((TOP / "include/cadre").glob("*.h")):
        types = re.findall(r"^(?:struct|class|enum class) (\w+)\b(?!;)", path.read_text(), re.M)
        rows.append([link(path, code(path.name)), " ".join(map(code, types))])
    return markdown(["header", "its types"], rows)


def definition(module, name):
    """The file and the docstring of a class or function of torch/cadre; None of anything else."""
    path = TOP / "torch/cadre" / f"{module}.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return path, ast.get_docstring(node) or ""
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(node.module, alias.name)
    return None


def listed(module):
    """`__all__` of a module of torch/cadre."""
    text = (TOP / "torch/cadre" / f"{module}.py").read_text()
    return ast.literal_eval(re.search(r"^__all__ = (\[.*?\])", text, re.M | re.S)[1])


def python(info):
    """The public names of the PyTorch package, each with the first sentence of its docstring."""
    rows = []
    for module in ("__init__", "ops", "checkpoints", "huggingface", "megatron"):
        prefix = "cadre." if module == "__init__" else f"cadre.{module}."
        for name in sorted(listed(module)):
            path, text = definition(module, name) or (None, "")
            if path:
                sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
                rows.append([code(prefix + name),
                             re.sub(r"([|\[])", r"\\\1", sentence.rstrip(":.")),
                             link(path, path.name)])
    return markdown(["name", "", "source"], rows)
