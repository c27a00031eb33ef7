"""Lists and runs gabbi files. Runs within the virtual environment that has gabbi; run.py calls it.

usage: gabbi_file.py list DIRECTORY
       gabbi_file.py run FILE PORT

It writes JSON. "list" writes one object for each file of the directory: its name, its fixtures, its tests,
and which of them are left out. "run" sends the tests to a server at the port of this host and writes one
object for each, as soon as it has run.
"""

import json
import sys
import traceback
import unittest
from pathlib import Path
from typing import Any, TextIO

from gabbi import handlers, suitemaker, utils

# These cannot be sent, by file and name: HTTP clients refuse a content-length that is no number.
LEFT_OUT = {("basic-http.yaml", "bad content length not int")}


def load(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Reads a file. Returns what it says, without the tests that are left out, and the names of those."""
    suite = utils.load_yaml(yaml_file=file)
    left_out = [test["name"] for test in suite["tests"] if (file.name, test["name"]) in LEFT_OUT]
    suite["tests"] = [test for test in suite["tests"] if test["name"] not in left_out]
    return suite, left_out


def list_files(directory: Path) -> list[dict[str, Any]]:
    """Tells what the files of a directory hold."""
    files = []
    for file in sorted(directory.glob("*.yaml")):
        suite, left_out = load(file)
        files.append(
            {
                "file": file.name,
                "fixtures": suite.get("fixtures", []),
                "tests": [test["name"] for test in suite["tests"]],
                "left_out": left_out,
            }
        )
    return files


class Reporter(unittest.TestResult):
    """Writes each test's outcome when the test is over."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def _report(self, test: Any, reason: str = "", details: str = "") -> None:
        """A test without a reason has passed."""
        outcome = {"test": test.test_data["name"], "reason": reason, "details": details}
        print(json.dumps(outcome), file=self._stream, flush=True)

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._report(test)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._report(test, str(err[1]) or "failed", "".join(traceback.format_exception(*err)))

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        reason = "".join(traceback.format_exception_only(err[0], err[1]))
        self._report(test, reason, "".join(traceback.format_exception(*err)))

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._report(test, f"skipped: {reason}")

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._report(test)

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self._report(test, "passed, but is marked as one that must fail")

    def stopTest(self, test: Any) -> None:
        super().stopTest(test)
        # Else the connection of each test stays open until the file's end.
        test.http.client.close()


def run_file(file: Path, port: int, stream: TextIO) -> None:
    """Runs the tests of a file, in their order."""
    suite_dict, _ = load(file)
    # The server is prepared already.
    suite_dict.pop("fixtures", None)
    # There is no TLS, but gabbi would read all root certificates for each test.
    suite_dict.setdefault("defaults", {})["cert_validate"] = False
    suite = suitemaker.test_suite_from_dict(
        unittest.defaultTestLoader,
        file.stem,
        suite_dict,
        str(file.parent),
        "127.0.0.1",
        port,
        fixture_module=None,
        intercept=None,
        handlers=[handler() for handler in handlers.RESPONSE_HANDLERS],
    )
    suite.run(Reporter(stream))


def main() -> None:
    """Does what the command line says."""
    # Gabbi prints to standard output where a test is verbose.
    stream, sys.stdout = sys.stdout, sys.stderr
    match sys.argv[1:]:
        case ["list", directory]:
            json.dump(list_files(Path(directory)), stream)
        case ["run", file, port]:
            run_file(Path(file), int(port), stream)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
