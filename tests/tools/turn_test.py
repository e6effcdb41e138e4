"""tools/turn.py knows what a source includes, in the folders in which the compiler looks."""
import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import turn  # noqa: E402


class Turn(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for path, text in {
                "src/a.cu": '#include <vector>\n#include "cadre/x.h"\n  # include "near.cuh"\n',
                "src/near.cuh": '#include "cuda/deep.h"\n#include "src/a.cu"\n',
                "src/cuda/deep.h": '#include "of_nobody.h"\n',
                "include/cadre/x.h": "",
                "src/b.cu": '// #include "cadre/x.h"\n'}.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

    def test_a_source_is_touched_by_what_it_includes(self):
        def touched(*changed):
            includes = turn.Includes(self.root)
            return [path for path in ("src/a.cu", "src/b.cu") if includes.touches(path, changed)]

        self.assertEqual(touched("src/a.cu"), ["src/a.cu"])
        self.assertEqual(touched("src/b.cu"), ["src/b.cu"])
        for header in ("include/cadre/x.h", "src/near.cuh", "src/cuda/deep.h"):
            self.assertEqual(touched("docs/other.md", header), ["src/a.cu"])
        self.assertEqual(touched("cadre/x.h", "of_nobody.h"), [])


if __name__ == "__main__":
    unittest.main()
