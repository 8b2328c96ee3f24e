#!/usr/bin/env bash
# Prints the path of a CPython of the release asked for (3.10, 3.11), or says how to get one.
# Looks at: $PYTHON, pythonX.Y on the PATH, pyenv's versions, uv's.
set -u
wanted=${1:?usage: find_python.sh 3.10}

fits() {
    [ -n "$1" ] && command -v "$1" >/dev/null 2>&1 &&
        "$1" -c "import sys; sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != tuple(map(int, '$wanted'.split('.'))))" 2>/dev/null
}

accept() {
    if fits "$1"; then
        command -v "$1"
        exit 0
    fi
}

accept "${PYTHON:-}"
accept "python$wanted"
accept python3
for home in "${PYENV_ROOT:-$HOME/.pyenv}"; do
    for candidate in "$home"/versions/"$wanted".*/bin/python; do
        accept "$candidate"
    done
done
if command -v uv >/dev/null 2>&1; then
    accept "$(uv python find --no-python-downloads "$wanted" 2>/dev/null)"
fi

{
    echo "No CPython $wanted found (looked at \$PYTHON, python$wanted, python3, pyenv and uv)."
    echo "Get one with either of these, then call make again:"
    echo "    pyenv install $wanted"
    echo "    uv python install $wanted"
    echo "or name one: make PYTHON=/path/to/python$wanted"
} >&2
exit 2
