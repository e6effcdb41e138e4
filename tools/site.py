"""What mkdocs.yml builds its site of: the pages of the repository where they lie, so that links are
the same on the site and on a code host. A source that a page links to becomes a page of its own.
"""
import pathlib
import re

from mkdocs.structure.files import File, Files, InclusionLevel

TOP = pathlib.Path(__file__).resolve().parent.parent
LANGUAGES = {".h": "cpp", ".cpp": "cpp", ".py": "python", ".json": "json", ".sh": "sh", "": "text"}
SOURCE = re.compile(r"\]\(([\w./-]+)(?=[#)])")
NAME = re.compile(r"(?<=^\| )`(cadre\.[\w.]+)`(?= \|)", re.MULTILINE)


def source(page, link):
    """The file that a page links to, if that is neither a page nor a picture; or None."""
    path = (page.parent / link).resolve()
    return path if path.is_file() and path.suffix in LANGUAGES else None


def on_files(files, config):
    """The repository's pages in place of those of docs_dir, and the sources that they link to."""
    pages = sorted(TOP.glob("*.md")) + sorted((TOP / "docs").rglob("*.md"))
    theme = [file for file in files if not file.src_uri.endswith((".md", ".svg"))]
    own = [File.generated(config, path.relative_to(TOP).as_posix(), abs_src_path=str(path))
           for path in [*pages, *sorted((TOP / "docs/plots").glob("*.svg"))]]
    linked = {source(page, link) for page in pages for link in SOURCE.findall(page.read_text())}
    return Files([*theme, *own, *(source_page(path, config) for path in sorted(linked - {None}))])


def source_page(path, config):
    name = path.relative_to(TOP).as_posix()
    text = f"# {path.name}\n\n`{name}`\n\n````{LANGUAGES[path.suffix]}\n{path.read_text()}\n````\n"
    return File.generated(config, f"{name}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def on_page_markdown(text, page, config, files):
    """Links to sources lead to their pages; the Python reference has the docstrings."""
    path = TOP / page.file.src_uri
    if path.is_file():
        text = SOURCE.sub(lambda link: link[0] + (".md" if source(path, link[1]) else ""), text)
    if path.name == "reference.md":
        docstrings = "".join(f"\n::: {name}\n" for name in NAME.findall(text))
        text = NAME.sub(r"[`\1`][\1]", text) + docstrings
    return text
