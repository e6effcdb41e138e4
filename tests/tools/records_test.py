"""Every record in bench/results names a commit of this history, from which its numbers can be had
again. A shallow clone or an exported tree has no history to look in, so there this is skipped."""
import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def git(root, *arguments):
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)


def has_history(root):
    answer = git(root, "rev-parse", "--show-toplevel", "--is-shallow-repository").stdout.split("\n")
    return pathlib.Path(answer[0]).resolve() == root.resolve() and answer[1:2] == ["false"]


def strangers(root):
    """Records whose commit is no ancestor of HEAD."""
    for path in sorted((root / "bench/results").glob("*.json")):
        commit = json.loads(path.read_text())["commit"]
        if git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode:
            yield path.name, commit


@unittest.skipUnless(shutil.which("git"), "no git")
class Records(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        git(self.root, "init", "-q")
        (self.root / "bench/results").mkdir(parents=True)

    def commit(self):
        git(self.root, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q",
            "--allow-empty", "-m", "a commit")
        return git(self.root, "rev-parse", "--short=12", "HEAD").stdout.strip()

    def record(self, name, commit):
        (self.root / "bench/results" / name).write_text(json.dumps({"commit": commit}))

    def test_every_record_of_this_project(self):
        if not has_history(ROOT):
            self.skipTest("no history here")
        self.assertEqual(list(strangers(ROOT)), [])

    def test_unknown_commits_and_other_branches_are_found(self):
        self.record("good.json", self.commit())
        git(self.root, "checkout", "-q", "-b", "other")
        self.record("other.json", self.commit())
        git(self.root, "checkout", "-q", "-")
        self.record("unknown.json", "4dd73a85c678")
        self.assertTrue(has_history(self.root))
        self.assertEqual([name for name, _ in strangers(self.root)], ["other.json", "unknown.json"])

    def test_a_shallow_clone_has_no_history(self):
        for _ in range(2):
            self.commit()
        shallow = self.root / "shallow"
        git(self.root, "clone", "-q", "--depth=1", f"file://{self.root}", shallow)
        self.assertFalse(has_history(shallow))
        self.assertFalse(has_history(self.root / "bench"))


if __name__ == "__main__":
    unittest.main()
