"""The servers under test: how a fresh one is started for a file, and ended again."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from fixtures import Fixture

START_SECONDS = 30.0
END_SECONDS = 5.0

# How much of a log is told where a server does not start.
LOG_CHARACTERS = 1000


class ServerError(Exception):
    """A server does not start."""


class Process:
    """A program with its output in files, ended at the end of a `with`."""

    _all: ClassVar[set["Process"]] = set()
    _lock: ClassVar = threading.Lock()
    _stopping: ClassVar = False

    def __init__(
        self,
        command: list[str],
        log: Path,
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the program; both outputs go to `log` unless standard output has a file of its own."""
        self.log = log
        with contextlib.ExitStack() as files, self._lock:
            if self._stopping:
                raise ServerError("the run is being ended")
            errors = files.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(output.open("wb")) if output else errors,
                stderr=errors,
                env=environment,
            )
            self._all.add(self)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def has_ended(self) -> bool:
        """Whether it has ended, by itself or by a signal."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it is still running after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Ends it: politely, then by force."""
        with self._lock:
            self._all.discard(self)
        self._process.terminate()
        if self.wait(END_SECONDS) is None:
            self._process.kill()
            self._process.wait()

    @classmethod
    def end_all(cls) -> None:
        """Ends every program that runs, and lets no other start."""
        with cls._lock:
            cls._stopping = True
            processes = list(cls._all)
        for process in processes:
            process.end()


class Target(Protocol):
    """A kind of server."""

    def start(self, name: str, fixture: Fixture, directory: Path) -> contextlib.AbstractContextManager[int]:
        """Starts an empty server, configured as the fixture says, within a directory of its own.

        `name` is unique in the run. Gives the port that it listens at.
        """


class EPlacement:
    """This project's server. Its servers share an etcd, each with a prefix of its own."""

    def __init__(self, binary: Path, etcd_port: int) -> None:
        self._binary = binary
        self._etcd_port = etcd_port

    @contextlib.contextmanager
    def start(self, name: str, fixture: Fixture, directory: Path) -> Iterator[int]:
        """See Target."""
        port = free_port()
        command = [
            str(self._binary),
            f"--listen=127.0.0.1:{port}",
            f"--etcd=http://127.0.0.1:{self._etcd_port}",
            f"--prefix=/gabbi/{name}",
            "--auth=noauth",
            f"--policy={fixture.profile}",
        ]
        if fixture.cors_origins:
            config = directory / "eplacement.yaml"
            # JSON is YAML, too.
            config.write_text(json.dumps({"cors": {"allowed_origins": fixture.cors_origins}}))
            command.append(f"--config={config}")
        with Process(command, directory / "server.log") as process:
            wait_until_ready(process, port, "/readyz")
            yield port


class OpenStack:
    """OpenStack Placement of a virtual environment, on a copy of the empty database beside it."""

    def __init__(self, venv: Path) -> None:
        self._venv = venv
        # The rules that an "open" server leaves to everybody. "admin_api" is what others are made of.
        script = (
            "from placement import policies; print(*(rule.name for rule in policies.list_rules()), sep='\\n')"
        )
        listing = subprocess.run(
            [str(venv / "bin/python"), "-c", script], check=True, capture_output=True, text=True, timeout=60
        )
        self._rules = [rule for rule in listing.stdout.splitlines() if rule != "admin_api"]

    @contextlib.contextmanager
    def start(self, name: str, fixture: Fixture, directory: Path) -> Iterator[int]:
        """See Target."""
        del name
        database = directory / "placement.sqlite"
        shutil.copy(self._venv / "template.sqlite", database)
        policy = directory / "policy.yaml"
        # JSON is YAML, too.
        policy.write_text(json.dumps(dict.fromkeys(self._rules, "@") if fixture.profile == "open" else {}))
        config = [
            "[api]",
            "auth_strategy = noauth2",
            "[placement_database]",
            f"connection = sqlite:///{database}",
            "[oslo_policy]",
            f"enforce_new_defaults = {fixture.profile == 'secure'}",
            f"policy_file = {policy}",
        ]
        if fixture.cors_origins:
            config += [
                "[cors]",
                f"allowed_origin = {','.join(fixture.cors_origins)}",
                "allow_headers = openstack-api-version",
            ]
        (directory / "placement.conf").write_text("\n".join((*config, "")))
        port = free_port()
        command = [
            str(self._venv / "bin/gunicorn"),
            "--workers=1",
            f"--bind=127.0.0.1:{port}",
            f"--env=OS_PLACEMENT_CONFIG_DIR={directory}",
            "placement.wsgi.api:application",
        ]
        with Process(command, directory / "server.log") as process:
            wait_until_ready(process, port, "/")
            yield port


@contextlib.contextmanager
def etcd(directory: Path, binary: str) -> Iterator[int]:
    """Starts an etcd with its data in a directory. Gives the port for clients."""
    port, peer_port = free_port(), free_port()
    command = [
        binary,
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{port}",
        f"--advertise-client-urls=http://127.0.0.1:{port}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}",
        f"--initial-cluster=default=http://127.0.0.1:{peer_port}",
    ]
    # Not every version knows it.
    unsafe = "--unsafe-no-fsync"
    if (
        subprocess.run([binary, unsafe, "--version"], capture_output=True, check=False, timeout=30).returncode
        == 0
    ):
        command.append(unsafe)
    with Process(command, directory / "etcd.log") as process:
        wait_until_ready(process, port, "/health")
        yield port


def free_port() -> int:
    """A port of this host that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(process: Process, port: int, path: str) -> None:
    """Returns when GET of `path` succeeds; raises if that takes too long, or if the process has ended."""
    deadline = time.monotonic() + START_SECONDS
    last = "nothing"
    while time.monotonic() < deadline and not process.has_ended():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            last = str(connection.getresponse().status)
            if last == "200":
                return
        except (OSError, http.client.HTTPException) as error:
            last = str(error)
        finally:
            connection.close()
        time.sleep(0.02)
    what = "it ended" if process.has_ended() else f"GET {path} gives {last} after {START_SECONDS:g} s"
    tail = process.log.read_text(errors="replace")[-LOG_CHARACTERS:].lstrip()
    raise ServerError(f"the server does not start: {what}; its log ends with:\n{tail}")
