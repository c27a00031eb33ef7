#!/usr/bin/python3
"""Runs a command as a child subreaper: what the command leaves behind is reaped here at once.

libvirt daemonises the QEMU that it probes and waits until its pid is gone. Where process 1 reaps slowly
(containers, small virtual machines) each probe then takes 15 seconds. Ends with the command.
usage: reaper.py COMMAND [ARGUMENT…]
"""
import ctypes
import os
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
    sys.exit(f"reaper: prctl: {os.strerror(ctypes.get_errno())}")
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(child, number))
while True:
    pid, status = os.wait()
    if pid == child:
        sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
