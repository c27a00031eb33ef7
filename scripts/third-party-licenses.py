#!/usr/bin/env python3
"""Prints which crates our programs are linked with, and under which licences, with their texts as the crates bring them.

usage: third-party-licenses.py TARGET PACKAGE…     (TARGET: a Rust triple)

What was fetched to build is all that it reads, so it needs no network; the same Cargo.lock and compiler give the same bytes.
A crate of which no text is to be had is an error.
"""
import html
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = re.compile(r"^(licen[cs]es?|copying|copyright|notice|unlicense)([-._].*)?$", re.IGNORECASE)
# What belongs to code that is not linked.
APART = {"tests", "test", "testdata", "benches", "examples", "fuzz", "docs", "ci", ".github"}
SOURCE = {".rs", ".c", ".h", ".py", ".sh", ".html", ".toml", ".json"}


def run(*words):
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked(target, packages):
    """Ids of the crates that end in these packages' programs: not what only builds or tests them."""
    metadata = json.loads(
        run("cargo", "metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", target)
    )
    of_name = {(crate["name"], crate["version"]): crate for crate in metadata["packages"]}
    wanted = [word for package in packages for word in ("-p", package)]
    edges = "normal,no-proc-macro"
    tree = run("cargo", "tree", "--locked", "--offline", "--target", target, "-e", edges, "--prefix", "none", *wanted)
    found = set()
    for line in tree.splitlines():
        if line.strip():
            name, version = line.split()[:2]
            found.add((name, version.removeprefix("v")))
    # Ours have no registry.
    return [of_name[key] for key in sorted(found) if of_name[key]["source"]]


def texts_of(place):
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place)
        if not path.is_file() or APART & set(inside.parts[:-1]):
            continue
        # REUSE keeps texts in LICENSES/, named by their licences.
        if (TEXT.match(path.name) or inside.parts[0] == "LICENSES") and path.suffix not in SOURCE:
            text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").strip("\n")
            # A file of one line names another file.
            if text.count("\n") > 1:
                yield text


def compilers():
    """What the compiler brings about itself."""
    return Path(run("rustc", "--print", "sysroot").strip()) / "share/doc/rust"


def read(path):
    try:
        return path.read_text(encoding="utf-8").strip("\n")
    except FileNotFoundError:
        sys.exit(f"third-party-licenses: {path} is missing")


def without_text(crate, others):
    """The text of a crate that brings none: of its licences one, or what another crate brings of the same."""
    chosen = next((name for name in ("Apache-2.0", "MIT") if name in (crate["license"] or "")), None)
    if not chosen:
        same = [texts[0] for other, texts in others if texts and other["license"] == crate["license"]]
        if not same:
            sys.exit(f"third-party-licenses: {crate['name']} {crate['version']} brings no text of its licence")
        return same[0]
    authors = ", ".join(re.sub(r" *<.*?>", "", author) for author in crate["authors"])
    text = read(compilers() / "licenses" / f"{chosen}.txt")
    return text.replace("<year> <copyright holders>", authors or f"the authors of {crate['name']}")


def standard_library():
    """Rust's own library, which each program has in it."""
    page = read(compilers() / "COPYRIGHT-library.html")
    page = re.sub(r"<(head|style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    text = re.sub(r"\n\s*\n\s*", "\n\n", text).strip("\n")
    version = run("rustc", "--version").split()[1]
    return f"Rust's standard library {version}", "MIT OR Apache-2.0", "https://github.com/rust-lang/rust", [text]


def main():
    target, packages = sys.argv[1], sys.argv[2:]
    parts = [standard_library()]
    crates = [
        (crate, list(dict.fromkeys(texts_of(Path(crate["manifest_path"]).parent)))) for crate in linked(target, packages)
    ]
    for crate, texts in crates:
        name = f"{crate['name']} {crate['version']}"
        texts = texts or [without_text(crate, crates)]
        parts.append((name, crate["license"] or "as below", crate["repository"] or "", texts))
    print("The programs of etcd-compute are linked with what stands here, each part under its own licence.\n")
    for name, licence, repository, _ in parts:
        print(f"{name}: {licence}" + (f"\n    {repository}" if repository else ""))
    # Most texts are those of others, but for how their lines are broken.
    sharing = {}
    for name, _, _, texts in parts:
        for text in texts:
            sharing.setdefault(" ".join(text.split()), (text, []))[1].append(name)
    for text, names in sharing.values():
        print("\n" + "=" * 100)
        print("Of " + ", ".join(dict.fromkeys(names)) + ":\n")
        print(text)


main()
