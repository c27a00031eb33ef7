#!/usr/bin/env python3
"""Runs OpenStack Placement's own API tests over HTTP against a server under test.

The tests are the gabbi files within the package openstack-placement. They, and gabbi, are in the virtual
environment that scripts/placement-venv.sh makes. Each file gets a server of its own, configured and filled
as the file's fixture says. The exit status is 0 only if all tests have run and passed.
"""

import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fixtures import FIXTURES, FixtureError, prepare
from servers import EPlacement, OpenStack, Process, ServerError, Target, etcd

# What openstack-placement 16.0.0 has, without the test that cannot be sent.
EXPECTED_FILES = 79
EXPECTED_TESTS = 1315

# How much of a failure's reason is printed.
REASON_CHARACTERS = 500

GABBI_FILE = Path(__file__).with_name("gabbi_file.py")
GABBITS = "lib/python3*/site-packages/placement/tests/functional/gabbits"


@dataclass(frozen=True)
class GabbiFile:
    """A file of tests."""

    path: Path
    fixture: str
    tests: list[str]
    left_out: list[str]


@dataclass
class Failure:
    """A test that did not pass."""

    test: str
    reason: str
    details: str = ""


@dataclass
class Outcome:
    """What came of a file."""

    file: str
    tests: int
    passed: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Runner:
    """Runs files against a target."""

    def __init__(self, target: Target, python: Path, directory: Path, seconds: float) -> None:
        """Runs gabbi with the given Python, keeps logs in the directory, gives each file the time given."""
        self._target = target
        self._python = python
        self._directory = directory
        self._seconds = seconds

    def run(self, file: GabbiFile) -> Outcome:
        """Runs a file against a fresh server."""
        start = time.monotonic()
        outcome = Outcome(file.path.name, len(file.tests), left_out=file.left_out)
        directory = self._directory / file.path.stem
        directory.mkdir()
        fixture = FIXTURES[file.fixture]
        problem = "was not run: gabbi ended early"
        results = directory / "results.json"
        try:
            with self._target.start(file.path.stem, fixture, directory) as port:
                variables = prepare(fixture, port)
                problem = self._gabbi(file, port, variables, directory, results) or problem
        except ServerError as error:
            problem = str(error)
        except FixtureError as error:
            problem = f"the server refuses the data of {file.fixture}: {error}"
        self._count(file, results, outcome, problem)
        outcome.seconds = round(time.monotonic() - start, 2)
        return outcome

    def _gabbi(
        self, file: GabbiFile, port: int, variables: dict[str, str], directory: Path, results: Path
    ) -> str | None:
        """Runs gabbi, with its results into a file. Returns what is wrong if it did not run all tests."""
        command = [str(self._python), str(GABBI_FILE), "run", str(file.path), str(port)]
        # A proxy would be asked for this host's own servers, too.
        environment = {
            name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
        }
        log = directory / "gabbi.log"
        with Process(command, log, results, environment | variables) as process:
            status = process.wait(self._seconds)
        if status is None:
            return f"was not run: the file took more than {self._seconds:g} s"
        if status:
            return f"was not run: gabbi ended with {status}: {log.read_text(errors='replace')[-2000:]}"
        return None

    @staticmethod
    def _count(file: GabbiFile, results: Path, outcome: Outcome, problem: str) -> None:
        """Adds the results to the outcome; tests without one have failed, because of `problem`."""
        missing = list(file.tests)
        for line in results.read_text().splitlines() if results.exists() else ():
            try:
                result = json.loads(line)
            except ValueError:
                # The last line may be cut off.
                break
            missing.remove(result["test"])
            if result["reason"]:
                outcome.failures.append(Failure(result["test"], result["reason"], result["details"]))
            else:
                outcome.passed += 1
        outcome.failures += [Failure(test, problem) for test in missing]


def list_files(python: Path, directory: Path) -> list[GabbiFile]:
    """Reads which tests there are."""
    listing = subprocess.run(
        [str(python), str(GABBI_FILE), "list", str(directory)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=60,
    )
    files = []
    for entry in json.loads(listing.stdout):
        [fixture] = entry["fixtures"]
        files.append(GabbiFile(directory / entry["file"], fixture, entry["tests"], entry["left_out"]))
    return files


def report(outcome: Outcome, verbose: bool) -> None:
    """Prints a file's line, and its failures."""
    print(f"{outcome.file:52} {outcome.passed:3}/{outcome.tests:<3} {outcome.seconds:6.2f} s", flush=True)
    for name in outcome.left_out:
        print(f"  left out: {name}")
    previous = None
    for failure in outcome.failures:
        print(f"  FAILED: {failure.test}")
        text = (verbose and failure.details) or failure.reason
        if text == previous:
            print("      (the same)")
            continue
        previous = text
        print("\n".join(f"      {line}" for line in (text.splitlines() if verbose else concise(text))))
    sys.stdout.flush()


def concise(reason: str) -> list[str]:
    """A reason in a few lines: without its own line breaks, and cut."""
    return textwrap.wrap(textwrap.shorten(reason, REASON_CHARACTERS, placeholder=" …"), 100)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    venv = os.environ.get("EC_TEST_PLACEMENT", "/var/cache/etcd-compute/placement")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, choices=("eplacement", "openstack"))
    parser.add_argument("--binary", type=Path, help="the program eplacement; for that target")
    parser.add_argument("--etcd", default="etcd", help="the program etcd; for the target eplacement")
    parser.add_argument(
        "--venv", type=Path, default=Path(venv), help="with gabbi and OpenStack (%(default)s)"
    )
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="run only files with matching names")
    parser.add_argument("--jobs", type=int, default=1, help="how many files at once (%(default)s)")
    parser.add_argument("--file-timeout", type=float, default=120.0, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--stop", action="store_true", help="start no other file after one with a failure")
    parser.add_argument("--keep-going", action="store_false", dest="stop", help="run all files (default)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all that is known of failures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary")
    parser.add_argument(
        "--logs", type=Path, metavar="DIRECTORY", help="keep the servers' logs in a new directory"
    )
    parsed = parser.parse_args()
    if parsed.target == "eplacement" and not (parsed.binary and parsed.binary.is_file()):
        parser.error("the target eplacement needs --binary with its path")
    return parsed


def select(parsed: argparse.Namespace, python: Path) -> list[GabbiFile]:
    """The files to run. Ends the program if the installed ones are not those expected."""
    directories = list(parsed.venv.glob(GABBITS))
    if not directories or not python.exists():
        sys.exit(f"{parsed.venv} has no OpenStack Placement: run scripts/placement-venv.sh {parsed.venv}")
    files = list_files(python, directories[0])
    tests = sum(len(file.tests) for file in files)
    if (len(files), tests) != (EXPECTED_FILES, EXPECTED_TESTS):
        sys.exit(
            f"{tests} tests in {len(files)} files, not {EXPECTED_TESTS} in {EXPECTED_FILES}: another version?"
        )
    return [file for file in files if not parsed.only or parsed.only.search(file.path.name)]


def main() -> int:
    """Does what the command line says. Returns the exit status."""
    parsed = arguments()
    # So that servers are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    python = parsed.venv / "bin/python"
    files = select(parsed, python)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        if parsed.logs:
            parsed.logs.mkdir(parents=True)
            directory = parsed.logs.absolute()
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="placement-api-tests-")))
        target: Target
        if parsed.target == "eplacement":
            target = EPlacement(parsed.binary.absolute(), stack.enter_context(etcd(directory, parsed.etcd)))
        else:
            target = OpenStack(parsed.venv.absolute())
        runner = Runner(target, python, directory, parsed.file_timeout)
        executor = stack.enter_context(concurrent.futures.ThreadPoolExecutor(parsed.jobs))
        try:
            for future in [executor.submit(runner.run, file) for file in files]:
                outcome = future.result()
                outcomes.append(outcome)
                report(outcome, parsed.verbose)
                if parsed.stop and outcome.failures:
                    break
        finally:
            # Else the executor would wait for what is left if this was interrupted.
            executor.shutdown(wait=False, cancel_futures=True)
            if len(outcomes) < len(files):
                Process.end_all()
    passed = sum(outcome.passed for outcome in outcomes)
    expected = sum(len(file.tests) for file in files)
    print(f"{passed} of {expected} passed")
    if parsed.json:
        summary: dict[str, Any] = {
            "target": parsed.target,
            "passed": passed,
            "expected": expected,
            "files": [asdict(outcome) for outcome in outcomes],
        }
        parsed.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if files and passed == expected else 1


if __name__ == "__main__":
    sys.exit(main())
