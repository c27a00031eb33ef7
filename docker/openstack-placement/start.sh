#!/bin/sh
# Brings the database up to date and serves.
set -eu
placement-manage db sync
# One worker with one thread: SQLite has one writer, and two of them give "database is locked" instead
# of an answer. The threaded kind, because it keeps idle connections without being held up by them.
exec gunicorn --bind 0.0.0.0:8080 --workers 1 --worker-class gthread --threads 1 --timeout 60 \
    --worker-tmp-dir /dev/shm --no-control-socket placement.wsgi.api:application
