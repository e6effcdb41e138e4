"""What `cadre facts` says where there is one GPU, the emulator: `facts_command_test.py CADRE`."""
import subprocess
import sys
import unittest

CADRE = sys.argv.pop(1)


class Facts(unittest.TestCase):
    def test_two_ranks_want_two_gpus(self):
        done = subprocess.run([CADRE, "facts", "--ranks", "2"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr,
                         "cadre: facts: ranks is 2, must be 1; this machine has 1 GPU\n")


if __name__ == "__main__":
    unittest.main()
