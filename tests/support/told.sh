#!/bin/sh
# Says where, with what arguments and with which environment it was to run Python: see warm_terminal.py.
printf '%s\0' "$PWD" "$#" "$@"
exec cat /proc/self/environ
