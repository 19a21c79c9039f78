"""Tasks with git: commit, branch, merge, revert, and find the commit that did it.

The verdict is read by git in a verifier, in the repository as it was prepared, with its own configuration: of the
policy's repository only objects, branches, tags, HEAD and the index come there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from kind import NAMES, Data, Tree, alike, found, kinds, setting, text, tree, words

from sparring.protocols import Sandbox

ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_AUTHOR_DATE": "2020-03-01T12:00:00Z", "GIT_COMMITTER_DATE": "2020-03-01T12:00:00Z",
}  # fmt: skip
BEGIN = [
    "git init -q -b main",
    "git config user.name Ash",
    "git config user.email ash@example.org",
    "git config gc.auto 0",
]
OBJECTS = re.compile(r"objects/([0-9a-f]{2}/[0-9a-f]{38}|pack/pack-[0-9a-f]{40}\.(pack|idx))")
REFS = re.compile(r"HEAD|index|sharedindex\.[0-9a-f]{40}|packed-refs|refs/(heads|tags)/[\w./-]+")
UNFINISHED = re.compile(
    r"(MERGE|CHERRY_PICK|REVERT|REBASE)_HEAD|BISECT_START|(rebase-merge|rebase-apply|sequencer)(/.*)?|.*\.lock"
)
"""Files of a merge, a revert or another change that was begun and not ended, and locks, with which no other can begin."""
KEPT = re.compile(r"info/(grafts|exclude|attributes)|shallow|objects/info/(http-)?alternates|refs/replace/.*")
"""Files by which git takes objects for others, or passes over files."""
SETTINGS = (
    "git config -f {} --get-regexp '^(core\\.(bare|worktree|repositoryformatversion|sparsecheckout.*)|extensions\\.)'"
)
"""Prints the settings without which git does not open a repository, or takes another folder for its own."""

MOST_FILES = 300
"""Files of a repository that may come into a verifier; a task makes some twenty."""

TOLD = """git for-each-ref --format='%(refname)' | while read ref; do
  echo "$ref%$(git show -s --format='%H%%%T%%%P%%%s' "$ref^{commit}")"
done"""
"""Prints of each branch and tag, with % between, its commit, that one's tree, parents and subject."""

CHECKED = "git fsck --full --no-dangling --no-progress > /dev/null"


class Commit(NamedTuple):
    """Commit that a branch or a tag leads to."""

    id: str
    tree: str
    parents: tuple[str, ...]
    subject: str


class History(NamedTuple):
    """Branch that is checked out, as `.git/HEAD` says, and branches and tags by name."""

    head: str
    refs: dict[str, Commit]


class Prepared(NamedTuple):
    """Repository as it was prepared: its history, its files of objects, of branches and of `KEPT`, its commits by
    subject."""

    history: History
    files: dict[str, bytes]
    commits: dict[str, str]


async def begin(box: Sandbox, data: Data) -> Prepared:
    """Make the repository."""
    await setting(box, [*BEGIN, *data["git"]], ENVIRONMENT)
    lines = (await setting(box, ["git log --all --format='%H %s'"], ENVIRONMENT)).splitlines()
    commits = {subject: commit for commit, _, subject in (line.partition(" ") for line in lines)}
    return Prepared(await history_of(box), read_by_git(await found(box, ".git")), commits)


async def judge(box: Sandbox, data: Data, prepared: Prepared) -> bool:
    """Judge the work tree and the index, then where branches and tags lead: those of `refs` as it says, all others as
    before."""
    entries = await found(box)
    work = {path: entry for path, entry in entries.items() if path.split("/")[0] != ".git"}
    own = {path.removeprefix(".git/"): entry for path, entry in entries.items() if path not in work}
    files, before = read_by_git(own), prepared.files
    changed = [name for name in {**files, **before} if files.get(name) != before.get(name)]
    if any(map(UNFINISHED.fullmatch, own)) or any(map(KEPT.fullmatch, changed)) or len(changed) > MOST_FILES:
        return False
    if "config" not in own or not alike(work, tree(data["after"])):
        return False
    verifier = await box.verifier([f".git/{name}" for name in changed])
    try:
        await verifier.write("/tmp/config", own["config"].data)
        ours, theirs = [await verifier.exec(SETTINGS.format(path)) for path in (".git/config", "/tmp/config")]
        if ours.stdout != theirs.stdout or (await verifier.exec(CHECKED, environment=ENVIRONMENT)).exit_code:
            return False
        left = await history_of(verifier)
        staged = (await verifier.exec("git ls-files --stage -v", environment=ENVIRONMENT)).stdout.splitlines()
    finally:
        await verifier.close()
    if not _is_index(staged, data["after"], data["refs"].get(data["head"], {}).get("files", data["after"])):
        return False
    refs = prepared.history.refs
    wanted = {name: commit for name, commit in refs.items() if name not in data["refs"]}
    for name, told in data["refs"].items():
        commit = left.refs.get(name)
        if commit is None:
            return False
        if "commit" in told:
            right = commit.id == prepared.commits[told["commit"]]
        else:
            parents = tuple(refs[parent].id for parent in told["parents"])
            right = (commit.tree, commit.parents) == (tree_id(told["files"]), parents)
            right = right and told["subject"] in (None, commit.subject)
        if not right:
            return False
        wanted[name] = commit
    return left.refs == wanted and left.head == f"ref: refs/{data['head']}"


def read_by_git(own: Tree) -> dict[str, bytes]:
    """Return the files of `.git` that come into a verifier where they have changed, or must not have."""
    return {
        path: entry.data
        for path, entry in own.items()
        if entry.kind != "folder" and any(pattern.fullmatch(path) for pattern in (OBJECTS, REFS, KEPT))
    }


async def history_of(box: Sandbox) -> History:
    """Return what a repository says, read by git."""
    refs = {}
    for line in (await box.exec(TOLD, environment=ENVIRONMENT, output_bytes=1 << 16)).stdout.splitlines():
        name, *told = line.split("%", 4)
        commit, root, parents, subject = told if len(told) == 4 else ("", "", "", "")  # it leads to no commit
        refs[name.removeprefix("refs/")] = Commit(commit, root, tuple(parents.split()), subject)
    return History((await box.read(".git/HEAD", 1000)).decode(errors="replace").strip(), refs)


def _is_index(staged: Sequence[str], work: Mapping[str, str], head: Mapping[str, str]) -> bool:
    """Return whether an index, as `git ls-files --stage -v` tells it, has of each file what is in HEAD or in the folder,
    without a mark by which git does not look at it."""
    told = {name: entry for entry, _, name in (line.partition("\t") for line in staged)}
    return set(told) == set(work) and all(
        told[name] in {f"H 100644 {blob_id(files[name])} 0" for files in (work, head) if name in files} for name in told
    )


def blob_id(content: str) -> str:
    """Return git's name of a file's content."""
    data = content.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree_id(files: Mapping[str, str]) -> str:
    """Return git's name of a tree of plain files."""
    parts = []
    for name in sorted(files):
        parts.append(b"100644 " + name.encode() + b"\0" + bytes.fromhex(blob_id(files[name])))
    body = b"".join(parts)
    return hashlib.sha1(b"tree %d\0" % len(body) + body).hexdigest()


def committed(message: str, files: Mapping[str, str]) -> list[str]:
    """Return commands that write files and commit them."""
    return [*written(files), "git add -A", f"git commit -q -m {message}"]


def written(files: Mapping[str, str]) -> list[str]:
    """Return commands that write files."""
    return [f"printf '%s' '{content}' > {name}" for name, content in files.items()]


def task(prompt: str, *, git: Sequence[str], after: Mapping[str, str], refs: Data, commands: Sequence[str], near: Any,
         head: str = "heads/main") -> dict[str, Any]:  # fmt: skip
    """Return a task whose files are all made by commands."""
    return {
        "prompt": prompt, "before": {}, "after": after, "git": git, "refs": refs, "head": head,
        "commands": list(commands), "near": near,
    }  # fmt: skip


def child(files: Mapping[str, str], subject: str | None, *parents: str) -> dict[str, Any]:
    """Return what is wanted of a commit: its files, its subject (None: any), the branches that its parents were on."""
    return {"files": dict(files), "subject": subject, "parents": list(parents or ("heads/main",))}


def commit(random: Random) -> dict[str, Any]:
    """One of two changed files is committed."""
    a, b, message, *others = random.sample(NAMES, 5)
    first = {name: text(words(random, 1, 3)) for name in (a, b)}
    now = {name: said + text([random.choice(others)]) for name, said in first.items()}
    return task(
        f"Commit the change of {a}, and not that of {b}, with the message {message}.",
        git=[*committed("first", first), *written(now)],
        after=now, refs={"heads/main": child({**first, a: now[a]}, message)},
        commands=[f"git add {a}", f"git commit -q -m {message}"],
        near=[[f"git add {a}"], [f"git commit -q -a -m {message}"], [f"git commit -q -m {others[0]} {a}"],
              [f"git commit -q --amend -m {message} {a}"]],
    )  # fmt: skip


def branch(random: Random) -> dict[str, Any]:
    """A commit on a branch of its own."""
    a, b, name, message = random.sample(NAMES, 4)
    first = {file: text(words(random, 1, 3)) for file in (a, b)}
    left = {b: first[b]}
    drops = [f"git rm -q {a}", f"git commit -q -m {message}"]
    return task(
        f"Make a branch {name} off main with one commit, with the message {message}, that deletes {a}. Leave main as it is, "
        f"and stay on {name}.",
        git=committed("first", first), after=left, head=f"heads/{name}",
        refs={f"heads/{name}": child(left, message)},
        commands=[f"git checkout -q -b {name}", *drops],
        near=[drops, [f"git checkout -q -b {name}", drops[0]], [*drops, f"git checkout -q -b {name}"],
              [f"git checkout -q -b {name}", *drops, "git checkout -q main"]],
    )  # fmt: skip


def merge(random: Random) -> dict[str, Any]:
    """A merge with a conflict."""
    a, b, c, name, *said = random.sample(NAMES, 9)
    first = {a: text(said[:1]), b: text(said[1:2]), c: text(said[2:3])}
    ours, theirs = {**first, a: text(said[3:4]), c: text(said[4:5])}, {**first, a: text(said[4:5]), b: text(said[3:5])}
    merged = {a: theirs[a], b: theirs[b], c: ours[c]}
    git = [
        *committed("first", first), f"git checkout -q -b {name}", *committed("theirs", theirs),
        "git checkout -q main", *committed("ours", ours),
    ]  # fmt: skip
    return task(
        f"Merge the branch {name} into main. Where both changed a line, keep what {name} has.",
        git=git, after=merged, refs={"heads/main": child(merged, None, "heads/main", f"heads/{name}")},
        commands=[f"git merge -q {name}", f"git checkout -q --theirs {a}", f"git add {a}", "git commit -q -m merged"],
        near=[[f"git merge -q {name}"], [f"git merge -q --no-edit -X ours {name}"],
              [f"git checkout -q {name} -- {a} {b}", "git commit -q -m merged"],
              [f"git merge -q {name}", f"git checkout -q --theirs {a}", f"git add {a}"]],
    )  # fmt: skip


def revert(random: Random) -> dict[str, Any]:
    """A commit before the last is undone."""
    a, b, message, *said = random.sample(NAMES, 8)
    first = {a: text(said[:1]), b: text(said[1:2])}
    broken = {**first, a: text(said[2:3])}
    last = {**broken, b: text(said[3:5])}
    fixed = {**last, a: first[a]}
    return task(
        f"Undo the commit with the message {message} by one new commit on main, and keep the others.",
        git=[*committed("first", first), *committed(message, broken), *committed("last", last)],
        after=fixed, refs={"heads/main": child(fixed, None)},
        commands=[f"git revert --no-edit ':/{message}'"],
        near=[["git reset -q --hard HEAD~2"], ["git revert --no-edit HEAD"], [f"git checkout -q HEAD~2 -- {a}"],
              [f"git revert --no-commit ':/{message}'"]],
    )  # fmt: skip


def culprit(random: Random) -> dict[str, Any]:
    """The commit that brought a word is tagged."""
    a, word, tag, *said = random.sample(NAMES, 10)
    messages = said[:6]
    at = random.randint(1, 4)
    lines, git = [messages[0]], []
    for number, message in enumerate(messages):
        lines.append(word if number == at else random.choice(said))
        git += committed(message, {a: text(lines)})
    return task(
        f"One of the commits put the word {word} into {a}. Tag that commit {tag}.",
        git=git, after={a: text(lines)}, refs={f"tags/{tag}": {"commit": messages[at]}},
        commands=[f"git tag {tag} $(git log --format=%h -S {word} -- {a} | tail -1)"],
        near=[[f"git tag {tag}"], [f"git tag {tag} HEAD~5"], [f"git branch {tag} HEAD~{5 - at}"], [f"git tag {tag} HEAD~{6 - at}"]],
    )  # fmt: skip


KINDS = kinds("git", commit, branch, merge, revert, culprit, programs=("git",), begin=begin, judge=judge)
