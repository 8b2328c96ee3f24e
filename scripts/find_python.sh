#!/usr/bin/env bash
# Prints the path of a CPython of the release asked for (3.10, 3.11) that can make environments.
# Looks at: $PYTHON, pythonX.Y and python3 on the PATH, pyenv's versions, uv's, and .python/versions.
# Where there is none it fetches one into .python with uv, and says how to get one where that fails.
set -u
wanted=${1:?usage: find_python.sh 3.10}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.python
# What else is to be said where nothing is found.
findings=""

say() {
    echo "$*" >&2
}

fits() {
    [ -n "$1" ] && command -v "$1" >/dev/null 2>&1 &&
        "$1" -c "import sys; sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != tuple(map(int, '$wanted'.split('.'))))" 2>/dev/null
}

# Debian and Ubuntu have ensurepip, without which venv fails half-way, in a package of its own.
has_venv() {
    "$1" -c "import ensurepip, venv" 2>/dev/null
}

note() {
    # An interpreter may be met under two names.
    [[ "$findings" == *"$1"* ]] || findings="$findings$1"$'\n'
}

note_missing_venv() {
    local version
    version=$("$1" -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null)
    note "$1 has no venv module: apt-get install python$version-venv"
}

accept() {
    fits "$1" || return
    if has_venv "$1"; then
        command -v "$1"
        exit 0
    fi
    note_missing_venv "$1"
}

look_for_fetched() {
    local candidate
    for candidate in "$folder"/versions/cpython-"$wanted".*/bin/python"$wanted"; do
        accept "$candidate"
    done
}

# uv from PyPI, in an environment of its own.
fetch_uv() {
    if ! command -v python3 >/dev/null 2>&1; then
        note "there is no python3 to fetch one with: apt-get install python3-venv"
        return 1
    fi
    if ! has_venv python3; then
        note_missing_venv python3
        return 1
    fi
    say "Fetching uv into ${folder#"$root"/}/uv"
    local index=()
    if [ -n "${UV_DEFAULT_INDEX:-}" ] && [ -z "${PIP_INDEX_URL:-}" ]; then
        index=(--index-url "$UV_DEFAULT_INDEX")
    fi
    if ! python3 -m venv --clear "$folder/uv" >&2 ||
        ! "$folder/uv/bin/python" -m pip --disable-pip-version-check --quiet install \
            "${index[@]}" -r "$root/requirements/uv.txt" >&2; then
        rm -rf "$folder/uv"
        return 1
    fi
}

fetch() {
    local uv
    uv=$(command -v uv)
    if [ -z "$uv" ]; then
        uv=$folder/uv/bin/uv
        [ -x "$uv" ] || fetch_uv || return 1
    fi
    say "Fetching CPython $wanted (some 30 MB) into ${folder#"$root"/}/versions with uv" \
        "(\$UV_PYTHON_INSTALL_MIRROR names a mirror of its downloads)"
    UV_PYTHON_INSTALL_DIR=$folder/versions UV_PYTHON_INSTALL_BIN=0 \
        "$uv" --no-progress python install "$wanted" >&2
}

accept "${PYTHON:-}"
accept "python$wanted"
accept python3
for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$wanted".*/bin/python; do
    accept "$candidate"
done
if command -v uv >/dev/null 2>&1; then
    accept "$(uv python find --no-python-downloads "$wanted" 2>/dev/null)"
fi
look_for_fetched

say "No CPython $wanted found (looked at \$PYTHON, python$wanted, python3, pyenv and uv)."
fetch && look_for_fetched

say "None could be fetched; why stands above."
[ -z "$findings" ] || say "${findings%$'\n'}"
say "Get one with either of these, then call make again:"
say "    pyenv install $wanted"
say "    uv python install $wanted"
say "or name one: make PYTHON=/path/to/python$wanted"
exit 2
