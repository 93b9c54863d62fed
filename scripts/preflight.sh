#!/bin/sh
# Is there a Python (3.10 or later) and a Java (17 or later) to work with? Prints the Python to use, or says in
# one line on stderr what is missing and exits 2. Honours PYTHON and JAVA_HOME. Changes nothing.
set -u

fail() {
    echo "onceflow: $1" >&2
    exit 2
}

python_version() { # prints e.g. 3.11 when it is new enough and can make a virtual environment
    "$1" -c 'import sys
if sys.version_info < (3, 10): sys.exit(3)
import ensurepip, venv' >/dev/null 2>&1
}

python=""
if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not an executable; set PYTHON to Python 3.10 or later."
    candidates=$PYTHON
else
    candidates="python3 python3.13 python3.12 python3.11 python3.10"
fi
why="Python 3.10 or later was not found; install it or set PYTHON to its path."
for candidate in $candidates; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    python_version "$candidate"
    case $? in
        0) python=$(command -v "$candidate"); break ;;
        3) why="Python 3.10 or later is needed, but $candidate is $("$candidate" -c 'import sys; sys.stdout.write("%d.%d" % sys.version_info[:2])' 2>/dev/null); set PYTHON to a newer one." ;;
        *) why="$candidate cannot make a virtual environment (no venv or ensurepip); install its venv package or set PYTHON." ;;
    esac
done
[ -n "$python" ] || fail "$why"

if [ -n "${JAVA_HOME:-}" ]; then
    java=$JAVA_HOME/bin/java
    [ -x "$java" ] || fail "JAVA_HOME=$JAVA_HOME has no bin/java; set JAVA_HOME to Java 17 or later."
else
    java=java
    command -v java >/dev/null 2>&1 || fail "Java 17 or later was not found; install a JDK or JRE, or set JAVA_HOME."
fi
# 'openjdk version "17.0.15" 2025-04-15'; before Java 9 it was "1.8.0_392". JAVA_TOOL_OPTIONS adds a line before it.
version=$("$java" -version 2>&1 | sed -n 's/^[^"]*version "\([^"]*\)".*/\1/p' | head -n 1)
major=${version#1.}
major=${major%%[!0-9]*}
[ -n "$major" ] || fail "$java does not run (no version in the answer of java -version); install Java 17 or later, or set JAVA_HOME."
[ "$major" -ge 17 ] || fail "Java 17 or later is needed, but $java is $version; set JAVA_HOME to a newer one."

echo "$python"
