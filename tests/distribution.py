"""Programs of a real distribution in boxes: `python tests/distribution.py IMAGE [--user 0] [name ...]`.

The image is Debian 12 with `PACKAGES`. Where there is Docker:

    python tests/distribution.py --dockerfile | docker build -t debian-box -
    docker save debian-box -o debian-box.tar && sparring image pull debian-box.tar --as debian

Each case is a text for bash with what it has to print last, in a box of its own. The status is 1 where one prints
something else. It needs control groups (`sparring sandbox doctor`).
"""

from __future__ import annotations

import argparse
import asyncio
import time

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec

PACKAGES = (
    "python3 python3-pytest python3-venv git gcc g++ libc6-dev make cmake tmux procps nodejs npm golang-go rustc cargo "
    "default-jdk-headless nginx-light redis-server postgresql sqlite3 ruby php-cli openssh-client gnupg curl lsof rsync "
    "ffmpeg imagemagick openssl"
)
GO = 'package main; import "fmt"; func main() { c := make(chan int); go func() { c <- 42 }(); fmt.Println(<-c) }'
RUST = 'fn main() { println!("{}", std::thread::spawn(|| 42).join().unwrap()); }'
JAVA = "public class A { public static void main(String[] a) { new Thread(() -> System.out.println(42)).start(); } }"
NODE = """const http = require("http"); http.createServer((q, r) => r.end("42")).listen(3000, () =>
http.get("http://localhost:3000", r => r.on("data", d => { console.log(String(d)); process.exit() })))"""
CASES = {
    "git": ("git init -q r && cd r && git -c user.name=x -c user.email=x@y commit -q --allow-empty -m 42 && git log --format=%s", "42"),
    "gcc": ("echo 'int main(){return 42;}' > a.c && gcc a.c && ./a.out; echo $?", "42"),
    "cmake": ("printf 'project(a C)\\nadd_executable(a a.c)' > CMakeLists.txt; echo 'int main(){return 42;}' > a.c; cmake -Wno-dev -S . -B b >/dev/null 2>&1 && cmake --build b >/dev/null && b/a; echo $?", "42"),
    "tmux": ("tmux new-session -d 'echo 42 > told'; until [ -s told ]; do :; done; cat told", "42"),
    "ps": ("ps aux | grep -c '[p]s aux'; free -m >/dev/null && uptime >/dev/null && top -bn1 >/dev/null && vmstat >/dev/null && echo 42", "42"),
    "pytest": ("echo 'def test(): pass' > test_a.py && python3 -m pytest -q test_a.py | grep -o '1 passed'", "1 passed"),
    "venv": ("python3 -m venv v && v/bin/pip --version | cut -d' ' -f1", "pip"),
    "node": (f"node -e '{NODE}'", "42"),
    "npm": ("npm init -y >/dev/null && npm pkg get license", '"ISC"'),
    "go": (f"echo '{GO}' > a.go && GOCACHE=$PWD/cache go run a.go", "42"),
    "rust": (f"echo '{RUST}' > a.rs && rustc a.rs && ./a", "42"),
    "cargo": ("export CARGO_HOME=$PWD/home; cargo new -q --vcs none a && cd a && cargo run -q --offline", "Hello, world!"),
    "java": (f"echo '{JAVA}' > A.java && java A.java", "42"),
    "ruby": ("ruby -e 'puts Thread.new { 42 }.value'", "42"),
    "php": ("php -r 'echo 42;'", "42"),
    "perl": ("perl -Mthreads -e 'print threads->create(sub { 42 })->join'", "42"),
    "nginx": ("service nginx start >/dev/null; curl -s --retry 9 --retry-connrefused localhost | grep -o 'Welcome to nginx' | head -1", "Welcome to nginx"),
    "redis": ("redis-server --daemonize yes >/dev/null; until redis-cli set a 42 >/dev/null 2>&1; do :; done; redis-cli get a", "42"),
    "postgres": ("export PATH=$(echo /usr/lib/postgresql/*/bin):$PATH; initdb -D pg >/dev/null && pg_ctl -D pg -o '-k /tmp' -w -l log start >/dev/null && psql -h localhost -d postgres -Atc 'select 42'", "42"),
    "sqlite": ("sqlite3 a.db 'pragma journal_mode=wal; create table t(a); insert into t values (42); select * from t'", "42"),
    "gpg": ("export GNUPGHOME=$PWD/g; mkdir -m 700 g; gpg -q --batch --passphrase '' --quick-gen-key a@b.c 2>/dev/null; echo 42 | gpg -q -e -r a@b.c --trust-model always | gpg -q -d 2>/dev/null", "42"),
    "ssh-keygen": ("ssh-keygen -q -t ed25519 -N '' -f k && echo 42", "42"),
    "openssl": ("openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -subj /CN=42 2>/dev/null; openssl x509 -in c -noout -subject", "subject=CN = 42"),
    "lsof": ("python3 -m http.server 8099 >/dev/null 2>&1 & until lsof -i :8099 2>/dev/null | grep -q LISTEN; do :; done; echo 42", "42"),
    "rsync": ("mkdir a && echo 42 > a/b && rsync -a a/ c && cat c/b", "42"),
    "ffmpeg": ("ffmpeg -loglevel error -f lavfi -i testsrc=duration=1:size=64x64 a.mp4 2>/dev/null; [ -s a.mp4 ] && echo 42", "42"),
    "imagemagick": ("convert -size 42x42 xc:red a.png && identify -format %w a.png", "42"),
    "dpkg": ("dpkg --remove rsync >/dev/null; which rsync || echo 42", "42"),
}  # fmt: skip
ONE_USER = {"postgres": 1000, "dpkg": 0}
"""Cases that one user alone can play: PostgreSQL refuses root, and dpkg whoever is not."""


async def play(image: str, user: int, names: list[str]) -> int:
    """Play the cases; return how many print something else than they have to."""
    boxes, missed = BubblewrapBoxes(SandboxConfig(servers=1)), 0
    spec = BoxSpec(image=image, user=user, timeout_s=60.0, disk_bytes=1 << 30, memory_bytes=2 << 30, processes=256)
    for name, (text, expected) in CASES.items():
        if names and name not in names or ONE_USER.get(name, user) != user:
            continue
        box, begin = await boxes.take(spec), time.perf_counter()
        result = await box.exec(["bash", "-c", text], cwd="/box")
        said = (result.stdout.strip().splitlines() or [""])[-1]
        missed += said != expected
        verdict = "runs" if said == expected else f"printed {said!r}: {result.stderr[-300:]!r}"
        print(f"{name:12} {time.perf_counter() - begin:6.2f} s  {verdict}", flush=True)
        await box.close()
    await boxes.close()
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default="debian")
    parser.add_argument("names", nargs="*", help="cases; none: all")
    parser.add_argument("--user", type=int, default=1000)
    parser.add_argument("--dockerfile", action="store_true", help="print how the image is made")
    options = parser.parse_args()
    if options.dockerfile:
        install = f"apt-get update && apt-get install -y --no-install-recommends {PACKAGES}"
        print(f"FROM debian:12\nRUN {install}")
    else:
        raise SystemExit(asyncio.run(play(options.image, options.user, options.names)) > 0)
