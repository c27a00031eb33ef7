#!/usr/bin/env python3
"""Runs the same `openstack` commands of osc-placement against two Placement servers and compares what they print.

usage: osc-compare.py URL URL        (in an environment with python-openstackclient and osc-placement)

Both servers must be empty and take the token `admin`. Exit code 1 where any command's output or success
differs, with both answers.
"""

import contextlib
import io
import json
import multiprocessing
import sys

from openstackclient.shell import OpenStackShell

ROOT = "11111111-1111-4111-8111-111111111111"
NUMA = "22222222-2222-4222-8222-222222222222"
SHARE = "33333333-3333-4333-8333-333333333333"
AGGREGATE = "44444444-4444-4444-8444-444444444444"
CONSUMER = "55555555-5555-4555-8555-555555555555"
OTHER = "66666666-6666-4666-8666-666666666666"
NOBODY = "99999999-9999-4999-8999-999999999999"

COMMANDS = f"""
resource provider create host --uuid {ROOT}
resource provider create numa --uuid {NUMA} --parent-provider {ROOT}
resource provider create share --uuid {SHARE}
resource provider create host
resource provider show {ROOT}
resource provider show {NOBODY}
resource provider set {NUMA} --name numa0
resource provider inventory set {ROOT} --resource VCPU=8 --resource VCPU:allocation_ratio=4.0 --resource MEMORY_MB=4096
resource provider inventory set {SHARE} --resource DISK_GB=1000 --resource DISK_GB:reserved=10
resource provider inventory class set {NUMA} SRIOV_NET_VF --total 4
resource provider inventory set {ROOT} --resource NO_SUCH=1
resource provider inventory list {ROOT}
resource provider inventory show {ROOT} VCPU
resource class create CUSTOM_GOLD
resource class set CUSTOM_SILVER
resource class list
resource class show CUSTOM_GOLD
resource class show CUSTOM_NONE
resource class delete CUSTOM_SILVER
resource class delete VCPU
trait create CUSTOM_FAST
trait create NOT_CUSTOM
trait list --name startswith:CUSTOM
trait show CUSTOM_FAST
resource provider trait set {ROOT} --trait CUSTOM_FAST --trait HW_CPU_X86_AVX
resource provider trait set {SHARE} --trait MISC_SHARES_VIA_AGGREGATE
resource provider trait set {ROOT} --trait CUSTOM_NONE
resource provider trait list {ROOT}
trait list --associated
trait delete CUSTOM_FAST
resource provider aggregate set {ROOT} --aggregate {AGGREGATE} --generation 2
resource provider aggregate set {SHARE} --aggregate {AGGREGATE} --generation 2
resource provider aggregate set {SHARE} --aggregate {AGGREGATE} --generation 1
resource provider aggregate list {ROOT}
resource provider list
resource provider list --in-tree {NUMA}
resource provider list --required CUSTOM_FAST
resource provider list --resource VCPU=4 --forbidden CUSTOM_FAST
resource provider list --member-of {AGGREGATE}
allocation candidate list --resource VCPU=1 --resource DISK_GB=10
allocation candidate list --resource VCPU=1 --resource DISK_GB=10 --required CUSTOM_FAST --limit 1
allocation candidate list --group A --resource VCPU=1 --group B --resource SRIOV_NET_VF=1 --group-policy none
allocation candidate list --resource VCPU=1000
resource provider allocation set {CONSUMER} --allocation rp={ROOT},VCPU=2 --allocation rp={SHARE},DISK_GB=10 --project-id p --user-id u --consumer-type INSTANCE
resource provider allocation set {OTHER} --allocation rp={ROOT},VCPU=100 --project-id p --user-id u --consumer-type INSTANCE
resource provider allocation set {OTHER} --allocation rp={NOBODY},VCPU=1 --project-id p --user-id u --consumer-type INSTANCE
resource provider allocation show {CONSUMER}
resource provider usage show {ROOT}
resource usage show p --user-id u
resource provider inventory delete {ROOT} --resource-class VCPU
resource provider delete {ROOT}
resource provider allocation unset {CONSUMER} --resource-class VCPU
resource provider allocation show {CONSUMER}
resource provider allocation delete {CONSUMER}
resource provider allocation delete {CONSUMER}
resource provider trait delete {ROOT}
resource provider delete {NUMA}
resource provider inventory delete {ROOT}
resource provider delete {ROOT}
resource provider delete {SHARE}
trait delete CUSTOM_FAST
resource provider list
"""


def run(url: str, command: str) -> tuple[int, str]:
    """Runs a command in a process of its own: the client keeps the first endpoint that it was given."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(shell, (url, command))


def shell(url: str, command: str) -> tuple[int, str]:
    """The exit code of a command and all that it prints, where that is JSON in one form."""
    auth = ["--os-auth-type", "admin_token", "--os-token", "admin", "--os-endpoint", url]
    auth += ["--os-placement-api-version", "1.39"]
    if " list" in command or " show" in command:
        command += " -f json"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = OpenStackShell().run(auth + command.split())
        except SystemExit as end:
            code = int(end.code or 0)
    # Of a table, the order of its rows means nothing.
    text = "\n".join(sorted(out.getvalue().splitlines()))
    with contextlib.suppress(ValueError):
        text = json.dumps(normal(json.loads(out.getvalue())), sort_keys=True)
    # Request ids differ in any case, and the address stands in some errors.
    words = [word for word in err.getvalue().split() if not word.startswith("(HTTP")]
    said = " ".join(word for word in words if "req-" not in word).replace(url, "URL")
    return code, text + said


def normal(value):
    """The order of lists means nothing; the number of a candidate neither."""
    if isinstance(value, list):
        return sorted((normal(one) for one in value), key=lambda one: json.dumps(one, sort_keys=True))
    if isinstance(value, dict):
        return {key: normal(one) for key, one in value.items() if key != "#"}
    if isinstance(value, str) and "," in value:
        return ",".join(sorted(value.split(",")))
    return value


def main() -> int:
    """Compares; answers the exit code."""
    first, second = sys.argv[1:]
    commands = [line for line in COMMANDS.splitlines() if line]
    different = failed = 0
    # What it loads at its first command each process has from this one: four fifths of its work. This one asks nobody.
    shell(first, "trait list --help")
    for command in commands:
        left, right = run(first, command), run(second, command)
        failed += left[0] != 0
        if left != right:
            different += 1
            print(f"openstack {command}\n  {first}: {left}\n  {second}: {right}")
    print(f"{len(commands)} commands, of which {failed} are refused; {different} differ")
    # A comparison in which nothing works proves nothing.
    return 1 if different or failed > len(commands) // 3 else 0


sys.exit(main())
