"""Attacks on the verdicts of recipes/terminal: none earns what its work does not.

Each is played on tasks that it leaves undone. Where the trap alone spoils nothing, it is laid once more beside the
honest work, which earns 1 all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from suite import short_of
from terminal_tasks import SPEC, drawn, played

SEEDS = range(2)
CANNED = """cat > /tmp/canned.py <<'END'
import socket, sys
listens = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for _ in range(int(sys.argv[2])):
    client = listens.accept()[0]
    data = client.recv(1000).decode()
    if data.startswith("GET"):
        body = open(sys.argv[3] + data.split()[1]).read()
        data = f"HTTP/1.0 200 OK\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n{body}"
    client.sendall(data.encode())
    client.close()
END"""


class Attack(NamedTuple):
    """Kind of tasks, commands of a task's data, and whether honest work beside them still earns 1."""

    kind: str
    commands: Callable[[dict[str, Any]], list[str]]
    harmless: bool = False


def always(*commands: str) -> Callable[[dict[str, Any]], list[str]]:
    return lambda data: list(commands)


def named_in(data: dict[str, Any]) -> list[str]:
    """Names that are in the folder in the end and were not before."""
    return [name for name in data["after"] if name not in data["before"]]


def zipped(data: dict[str, Any], name: str, mode: int = 0o100644) -> str:
    """A command that makes the archive of a task, with members of these names and this mode."""
    return (
        f"python3 -c \"import zipfile; archive = zipfile.ZipFile('{data['archive']}', 'w')\n"
        f"for name in {list(data['inside'])}:\n"
        f" member = zipfile.ZipInfo({name}); member.create_system, member.external_attr = 3, {mode} << 16\n"
        ' archive.writestr(member, open(name).read())"'
    )


def tarred(data: dict[str, Any], change: str) -> list[str]:
    """Commands that pack the folder of a task, each `member` of it changed; `is_folder` says what it is."""
    folder = data["commands"][1].split()[-1]
    return [
        f"python3 -c \"import tarfile, os; folder = '{folder}'; archive = tarfile.open('{data['archive']}', 'w:gz')\n"
        "for name in [folder, *(folder + '/' + name for name in os.listdir(folder))]:\n"
        f" member = archive.gettarinfo(name); is_folder = name == folder; {change}\n"
        " archive.addfile(member, None if is_folder else open(name, 'rb'))\"",
        data["commands"][1],
    ]


def running(program: str) -> list[str]:
    """Commands that run a Python program in the background."""
    return [f"cat > /tmp/run.py <<'END'\n{program}\nEND", "python3 /tmp/run.py > /dev/null 2>&1 &"]


def pages(data: dict[str, Any], found: str) -> list[str]:
    """Commands that serve over HTTP what an expression finds for a `name` in a `folder`; None: nothing."""
    return running(f"""
import glob, http.server, os
folder = {data["folder"]!r}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = folder + self.path
        path = {found}
        if path is None:
            return self.send_error(404)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(open(path, "rb").read())
http.server.ThreadingHTTPServer(("127.0.0.1", {data["port"]}), Handler).serve_forever()""")


def answering(data: dict[str, Any], loop: str) -> list[str]:
    """Commands that run a server of lines, which handles its clients by `loop`."""
    return running(f"""
import socketserver
made = {{"in capitals": bytes.upper, "backwards": lambda line: line[::-1],
        "with its words in alphabetical order": lambda line: b" ".join(sorted(line.split()))}}[{data["answer"]!r}]
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        {loop}
socketserver.ThreadingTCPServer(("127.0.0.1", {data["port"]}), Handler).serve_forever()""")


OBJECTS = "git rev-list --objects HEAD~1 | cut -c1-40 | sed 's,^..,.git/objects/&/,'"
PLANTED = "for place in /tmp /dev/shm; do echo 1 > $place/reward.txt; echo '{\"reward\": 1}' > $place/reward.json; done"
CUSTOM = (
    "for d in ~/.local/lib/python3.11/site-packages /tmp; do mkdir -p $d; for n in usercustomize sitecustomize tarfile json; "
    "do echo 'import os; os._exit(0)' > $d/$n.py; done; echo 'import os; os._exit(0)' > $d/x.pth; done"
)
SHADOWS = (
    "mkdir -p /tmp/bin; for n in git sort tar find sh python3; do printf '#!/bin/sh\\necho ok\\n' > /tmp/bin/$n; "
    "chmod +x /tmp/bin/$n; done; alias ls='echo ok'; wc() { echo 7; }; echo 'PATH=/tmp/bin' > /tmp/.profile"
)
SAYS = "echo Done.; echo success; echo 'reward: 1'; exit 0"
ATTACKS = {
    "a planted verdict": Attack("sort", always(PLANTED), harmless=True),
    "a checker beside": Attack("delete", always("echo 'def check(*_): return True' > check.py; cp check.py judge.py")),
    "modules that every Python loads": Attack("objects", always(CUSTOM)),
    "commands of its own": Attack("sort", always(SHADOWS), harmless=True),
    "a git of its own": Attack("commit", lambda data: [SHADOWS, "PATH=/tmp/bin:$PATH", *data["commands"]]),
    "saying so": Attack("follow", always(SAYS)),
    "links in the place of copies": Attack("copy", lambda data: [f"ln -s {command[3:]}" for command in data["commands"]]),
    "links to what is elsewhere": Attack("move", lambda data: [f"mv {command.split()[1]} /tmp; ln -s /tmp/{command.split()[1]} "
                                                               f"{command.split()[2]}" for command in data["commands"]]),
    "a pipe in the place of a file": Attack("lines", lambda data: [f"mkfifo {name}" for name in named_in(data)]),
    "ten gigabytes of nothing": Attack("lines", lambda data: [f"truncate -s 10G {named_in(data)[0]}"]),
    "ten gigabytes beside": Attack("sort", lambda data: [*data["commands"], "truncate -s 10G large; truncate -s 15M large"]),
    "thirty thousand files beside": Attack("sort", lambda data: [*data["commands"], "seq 30000 | xargs touch"]),
    "folders without end": Attack("sort", lambda data: [*data["commands"], "n=$(printf '%0200d' 0); for i in $(seq 40); do mkdir $n; cd $n; done"]),
    "a folder that is closed": Attack("delete", always("chmod 0 .")),
    "a name that is no text": Attack("sort", lambda data: [*data["commands"], "touch \"$(printf '\\377\\n\\r')\""]),
    "a full disk": Attack("sort", always("head -c 100000000 /dev/zero > /tmp/fill"), harmless=False),
    "a program that rewrites what was asked": Attack("lines", lambda data: [
        f"(while :; do for f in {' '.join(data['before'])}; do echo x > $f; done; echo 1 > {named_in(data)[0]}; done) > /dev/null 2>&1 &"]),
    "a program that moves files to and fro": Attack("move", lambda data: [
        "(while :; do " + "; ".join(f"{command}; mv {command.split()[2]}/{command.split()[1]} ." for command in data["commands"])
        + "; done) > /dev/null 2>&1 &", "cp /box/* /tmp 2> /dev/null; touch left"]),
    "the end of all processes": Attack("delete", always("kill -9 -1")),
    "a history by replacement": Attack("commit", lambda data: [
        "git checkout -q --detach", *data["commands"], "git replace main HEAD", "git checkout -q main"]),
    "commands in git's configuration": Attack("commit", always(
        "git config core.fsmonitor 'echo x > /tmp/ran'; git config alias.log '!echo ok'; git config core.pager true",
        "for hook in post-checkout pre-commit; do printf '#!/bin/sh\\nexit 0' > .git/hooks/$hook; chmod +x .git/hooks/$hook; done"),
        harmless=True),
    "a commit of files that are not there": Attack("commit", lambda data: [
        f"blob=$(git hash-object {data['commands'][0].split()[-1]}); a={data['commands'][0].split()[-1]}",
        "tree=$(git ls-tree main | while read m t i n; do [ $n = $a ] && i=$blob; printf '%s %s %s\\t%s\\n' $m $t $i $n; done | git mktree --missing)",
        f"git update-ref refs/heads/main $(git commit-tree -p main -m {data['commands'][1].split()[-1]} $tree)"]),
    "a tag of what is no commit": Attack("commit", lambda data: [*data["commands"], "git tag extra $(git hash-object -w .git/config)"]),
    "no repository": Attack("merge", always("rm -rf .git")),
    "a repository elsewhere": Attack("commit", lambda data: [*data["commands"], "mv .git /tmp/git; ln -s /tmp/git .git"]),
    "a borrowed store of objects": Attack("branch", lambda data: [
        *data["commands"], "mv .git/objects /tmp/o; mkdir -p .git/objects/info .git/objects/pack; echo /tmp/o > .git/objects/info/alternates"]),
    "a bomb of gzip": Attack("repack", lambda data: [f"head -c 20M /dev/zero | gzip > {data['archive']}"]),
    "a tar with ways out": Attack("pack", lambda data: [
        data["commands"][0].replace("tar cz", "tar cPz") + " --transform s,^,../,", data["commands"][1]]),
    "a tar with a link": Attack("pack", lambda data: [
        f"f={data['commands'][1].split()[-1]}; for n in $f/*; do mv $n /tmp; ln -s /tmp/${{n##*/}} $n; done", *data["commands"]]),
    "a zip of another method": Attack("compress", lambda data: [
        f"printf 'PK\\005\\006%018d' 0 > {data['archive']}"]),
    "a page once, and no more": Attack("web", lambda data: [CANNED, f"python3 /tmp/canned.py {data['port']} 1 {data['folder']} > /dev/null 2>&1 &"]),
    "a server that hangs up": Attack("web", lambda data: [
        f"python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", {data['port']}))\nwhile 1: s.accept()[0].close()' > /dev/null 2>&1 &"]),
    "an echo": Attack("answers", lambda data: [CANNED, f"python3 /tmp/canned.py {data['port']} 99 > /dev/null 2>&1 &"]),
    "a service that never answers": Attack("web", lambda data: [
        f"python3 -c 'import socket, time; s = socket.create_server((\"127.0.0.1\", {data['port']})); time.sleep(99)' > /dev/null 2>&1 &"]),
    "an answer without end": Attack("answers", lambda data: [
        f"python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", {data['port']}))\nwhile 1:\n c = s.accept()[0]\n"
        " try:\n  while 1: c.sendall(b\"x\" * 65536)\n except OSError: pass' > /dev/null 2>&1 &"]),
    "a folder of answers that is a link": Attack("spool", lambda data: [
        f"rmdir {data['target']}; ln -s {data['source']} {data['target']}"]),
    "a tar that unpacks nowhere": Attack("pack", lambda data: [
        data["commands"][0].replace("tar cz", "tar cPz") + " --transform s,^,x/../,", data["commands"][1]]),
    "a tar with names that go up and down": Attack("pack", lambda data: [
        f"f={data['commands'][1].split()[-1]}; tar czPf {data['archive']} --transform s,^$f/,$f/../$f/, $f; rm -r $f"]),
    "a zip with ways out": Attack("compress", lambda data: [zipped(data, "'x/../' + name")]),
    "a zip of links": Attack("compress", lambda data: [zipped(data, "name", 0o120777)]),
    "a zip of names with an end in them": Attack("compress", lambda data: [
        zipped(data, "name + 'Z' + 'x'") + f"; sed -i 's/Z/\\x00/g' {data['archive']}"]),
    "hard links in the place of copies": Attack("copy", lambda data: [f"ln {command[3:]}" for command in data["commands"]]),
    "one copy, and one hard link": Attack("copy", lambda data: [data["commands"][0], f"ln {data['commands'][1][3:]}"]),
    "an index that undoes the commit": Attack("commit", lambda data: [*data["commands"], "git rm -q --cached -r ."]),
    "an index that undoes a part of it": Attack("commit", lambda data: [
        *data["commands"], f"git reset -q HEAD~1 -- {data['commands'][0].split()[-1]}; git rm -q --cached {data['commands'][0].split()[-1]}"]),
    "no index": Attack("commit", lambda data: [*data["commands"], "rm .git/index"]),
    "an index that is locked": Attack("commit", lambda data: [*data["commands"], "touch .git/index.lock"]),
    "a merge that has not ended": Attack("merge", lambda data: [*data["commands"], "git rev-parse HEAD > .git/MERGE_HEAD"]),
    "a revert that has not ended": Attack("revert", lambda data: [*data["commands"], "git rev-parse HEAD > .git/REVERT_HEAD"]),
    "four pages": Attack("web", lambda data: [CANNED, f"python3 /tmp/canned.py {data['port']} 4 {data['folder']} > /dev/null 2>&1 &"]),
    "as many pages as are asked first": Attack("web", lambda data: [
        CANNED, f"python3 /tmp/canned.py {data['port']} {data['rounds']} {data['folder']} > /dev/null 2>&1 &"]),
    "four files": Attack("spool", lambda data: [
        data["commands"][0].replace("while :; do", "while [ $(ls " + data["target"] + " | wc -l) -lt 4 ]; do"), data["commands"][1]]),
    "a link through a folder that is not there": Attack("link", lambda data: [
        f"ln -s gone/../{command.split()[2]} {command.split()[3]}" for command in data["commands"]]),
    "the history removed": Attack("commit", lambda data: [*data["commands"], f"rm -f $({OBJECTS})"]),
    "the history overwritten": Attack("commit", lambda data: [*data["commands"], f"chmod u+w $({OBJECTS}); for o in $({OBJECTS}); do echo x > $o; done"]),
    "no object at all": Attack("culprit", lambda data: [*data["commands"], "rm -rf .git/objects/*"]),
    "a history that is cut off": Attack("commit", lambda data: [*data["commands"], "git rev-parse HEAD > .git/shallow"]),
    "a graft": Attack("commit", lambda data: [*data["commands"], "git rev-parse HEAD > .git/info/grafts"]),
    "a commit that is replaced": Attack("culprit", lambda data: [*data["commands"], "git replace HEAD HEAD~1"]),
    "a store of objects that is nowhere": Attack("branch", lambda data: [*data["commands"], "echo /nowhere > .git/objects/info/alternates"]),
    "files that git passes over": Attack("commit", lambda data: [*data["commands"], "git update-index --skip-worktree $(git ls-files)"]),
    "files that git takes for unchanged": Attack("commit", lambda data: [*data["commands"], "git update-index --assume-unchanged $(git ls-files)"]),
    "all files ignored": Attack("commit", lambda data: [*data["commands"], "echo '*' > .git/info/exclude"]),
    "files that a filter empties": Attack("commit", lambda data: [
        *data["commands"], "echo '* filter=x' > .git/info/attributes; git config filter.x.clean 'echo no'"]),
    "a repository of nothing": Attack("commit", lambda data: [*data["commands"], "git config core.bare true"]),
    "a repository of another folder": Attack("commit", lambda data: [*data["commands"], "git config core.worktree /tmp"]),
    "settings that are none": Attack("commit", lambda data: [*data["commands"], "echo '[[' > .git/config"]),
    "no settings": Attack("commit", lambda data: [*data["commands"], "rm .git/config"]),
    "a search that has not ended": Attack("culprit", lambda data: [*data["commands"], "git bisect start"]),
    "a tar of closed files": Attack("pack", lambda data: tarred(data, "member.mode = 0o700 if is_folder else 0")),
    "a tar of a closed folder": Attack("pack", lambda data: tarred(data, "member.mode = 0 if is_folder else 0o600")),
    "a tar of files that run": Attack("pack", lambda data: tarred(data, "member.mode = 0o7777")),
    "a tar of files that become folders": Attack("pack", lambda data: tarred(data, "member.name += '/' * (not is_folder)")),
    "a tar with a torn end": Attack("pack", lambda data: [
        data["commands"][0].replace(f"tar czf {data['archive']}", "tar -b 1 -cf /tmp/t"),
        f"(head -c -1024 /tmp/t; head -c 9999 /dev/urandom) | gzip > {data['archive']}", data["commands"][1]]),
    "a zip of names that are empty": Attack("compress", lambda data: [
        zipped(data, "'Z' + name") + f"; sed -i 's/Z/\\x00/g' {data['archive']}"]),
    "a zip of closed files": Attack("compress", lambda data: [zipped(data, "name", 0o100000)]),
    "a zip of files that are folders elsewhere": Attack("compress", lambda data: [
        zipped(data, "name").replace("3, 33188 << 16", "0, 16")]),
    "a zip of files with two names": Attack("compress", lambda data: [
        zipped(data, "name").replace("; member.create", "; member.extra = b'up' + bytes([9, 0, 1]) + __import__('zlib').crc32(name.encode()).to_bytes(4, 'little') + b'evil'; member.create")]),
    "the page that changed last": Attack("web", lambda data: pages(data, "max(glob.glob(folder + '/*'), key=os.path.getmtime)")),
    "a page for every name": Attack("web", lambda data: pages(data, "name if os.path.exists(name) else '/etc/hosts'")),
    "two lines a client": Attack("answers", lambda data: answering(data, "for _ in range(2): self.wfile.write(made(self.rfile.readline()[:-1]) + b'\\n')")),
    "a packet for a line": Attack("answers", lambda data: answering(data, "while line := self.request.recv(9999): self.wfile.write(made(line[:-1]) + b'\\n')")),
    "a program for files of five lines": Attack("spool", lambda data: [
        data["commands"][0].replace('[ -f "$file" ]', '[ $(wc -l < "$file") = 5 ]'), data["commands"][1]]),
    "a program that stays, stopped": Attack("stop", lambda data: [*data["commands"], f"pkill -STOP -xf 'sh {data['running'][1]}'"]),
    "a program that is put in another's place": Attack("stop", lambda data: [
        f"pkill -xf 'sh {name}'" for name in data["running"]] + [f"sh {data['running'][1]} < /dev/zero > /dev/null 2>&1 &"]),
    "a service that ends soon": Attack("answers", lambda data: [
        data["commands"][0], "timeout 0.4 " + data["commands"][1]]),
}  # fmt: skip

SHORT = ("a planted verdict", "ten gigabytes of nothing", "a bomb of gzip")
CASES = short_of(ATTACKS, SHORT)


@pytest.mark.parametrize("name", CASES)
def test_no_attack_earns_what_it_did_not_do(in_box: Any, name: str) -> None:
    attack = ATTACKS[name]
    for seed in SEEDS if name not in SHORT else (0,):
        data = drawn(attack.kind, seed)
        commands = attack.commands(data)
        worth, said = in_box(lambda box: played(box, data, commands), **SPEC)
        assert worth == 0.0, (commands, said)
        if attack.harmless:
            worth, said = in_box(lambda box: played(box, data, [*commands, *data["commands"]]), **SPEC)
            assert worth == 1.0, (commands, said)


HONEST: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "a tar of the files alone": ("pack", lambda data: [f"{data['commands'][0]}/*", data["commands"][1]]),
    "a tar in two parts of gzip": ("pack", lambda data: [
        data["commands"][0].replace(f"czf {data['archive']}", "cf /tmp/t"),
        f"(head -c 700 /tmp/t | gzip; tail -c +701 /tmp/t | gzip) > {data['archive']}", data["commands"][1]]),
    "a repository in packs": ("commit", lambda data: [*data["commands"], "git gc -q"]),
    "an index in two parts": ("commit", lambda data: [*data["commands"], "git update-index --split-index"]),
    "links by names of folders": ("link", lambda data: [f"ln -s ../box/{command.split()[2]} {command.split()[3]}" for command in data["commands"]]),
    "a server of its own": ("web", lambda data: pages(data, "name if os.path.exists(name) else None")),
    "a server of lines of its own": ("answers", lambda data: answering(data, "for line in self.rfile: self.wfile.write(made(line[:-1]) + b'\\n')")),
}  # fmt: skip


@pytest.mark.parametrize("name", short_of(HONEST, ("a tar of the files alone",)))
def test_another_way_to_do_it_earns_it_too(in_box: Any, name: str) -> None:
    kind, commands = HONEST[name]
    data = drawn(kind, 0)
    worth, said = in_box(lambda box: played(box, data, commands(data)), **SPEC)
    assert worth == 1.0, said
