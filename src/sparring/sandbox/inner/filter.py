"""System call filter of a box's commands (seccomp), by architecture: a list of what is allowed.

A call that is in no list answers ENOSYS, as an older kernel would, so programs take another way. Constants are from the
kernel's headers (linux/seccomp.h, linux/filter.h, linux/sched.h, asm/unistd.h). The numbers of aarch64 are unverified.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import Any, NamedTuple, Union

ALLOWED = """
accept:43:202 accept4:288:242 access:21:- alarm:37:- arch_prctl:158:- bind:49:200 brk:12:214 cachestat:451:451
capget:125:90 capset:126:91 chdir:80:49 chmod:90:- clock_getres:229:114 clock_gettime:228:113
clock_nanosleep:230:115 close:3:57 close_range:436:436 connect:42:203 copy_file_range:326:285 creat:85:- dup:32:23
dup2:33:- dup3:292:24 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_pwait:281:22
epoll_pwait2:441:441 epoll_wait:232:- eventfd:284:- eventfd2:290:19 execve:59:221 execveat:322:281 exit:60:93
exit_group:231:94 faccessat:269:48 faccessat2:439:439 fadvise64:221:223 fallocate:285:47 fchdir:81:50 fchmod:91:52
fchmodat:268:53 fchmodat2:452:452 fdatasync:75:83 fgetxattr:193:10 flistxattr:196:13 flock:73:32 fork:57:-
fremovexattr:199:16 fsetxattr:190:7 fstat:5:80 fstatfs:138:44 fsync:74:82 ftruncate:77:46 futex:202:98
futex_requeue:456:456 futex_wait:455:455 futex_waitv:449:449 futex_wake:454:454 futimesat:261:-
get_robust_list:274:100 getcpu:309:168 getcwd:79:17 getdents:78:- getdents64:217:61 getegid:108:177 geteuid:107:175
getgid:104:176 getgroups:115:158 getitimer:36:102 getpeername:52:205 getpgid:121:155 getpgrp:111:- getpid:39:172
getppid:110:173 getpriority:140:141 getrandom:318:278 getresgid:120:150 getresuid:118:148 getrlimit:97:163
getrusage:98:165 getsid:124:156 getsockname:51:204 getsockopt:55:209 gettid:186:178 gettimeofday:96:169
getuid:102:174 getxattr:191:8 inotify_add_watch:254:27 inotify_init:253:- inotify_init1:294:26
inotify_rm_watch:255:28 ioprio_get:252:31 ioprio_set:251:30 kill:62:129 lgetxattr:192:9 link:86:- linkat:265:37
listen:50:201 listxattr:194:11 llistxattr:195:12 lremovexattr:198:15 lseek:8:62 lsetxattr:189:6 lstat:6:-
madvise:28:233 membarrier:324:283 mincore:27:232 mkdir:83:- mkdirat:258:34 mknod:133:- mknodat:259:33 mlock:149:228
mlock2:325:284 mlockall:151:230 mmap:9:222 mprotect:10:226 mremap:25:216 mseal:462:462 msync:26:227 munlock:150:229
munlockall:152:231 munmap:11:215 nanosleep:35:101 newfstatat:262:79 open:2:- openat:257:56 openat2:437:437
pause:34:- pidfd_open:434:434 pidfd_send_signal:424:424 pipe:22:- pipe2:293:59 pkey_alloc:330:289 pkey_free:331:290
pkey_mprotect:329:288 poll:7:- ppoll:271:73 prctl:157:167 pread64:17:67 preadv:295:69 preadv2:327:286
pselect6:270:72 pwrite64:18:68 pwritev:296:70 pwritev2:328:287 read:0:63 readahead:187:213 readlink:89:-
readlinkat:267:78 readv:19:65 recvfrom:45:207 recvmmsg:299:243 recvmsg:47:212 removexattr:197:14 rename:82:-
renameat:264:38 renameat2:316:276 restart_syscall:219:128 rmdir:84:- rseq:334:293 rt_sigaction:13:134
rt_sigpending:127:136 rt_sigprocmask:14:135 rt_sigqueueinfo:129:138 rt_sigreturn:15:139 rt_sigsuspend:130:133
rt_sigtimedwait:128:137 rt_tgsigqueueinfo:297:240 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_getaffinity:204:123 sched_getattr:315:275 sched_getparam:143:121 sched_getscheduler:145:120
sched_rr_get_interval:148:127 sched_setaffinity:203:122 sched_setattr:314:274 sched_setparam:142:118
sched_setscheduler:144:119 sched_yield:24:124 seccomp:317:277 select:23:- sendfile:40:71 sendmmsg:307:269
sendmsg:46:211 sendto:44:206 set_robust_list:273:99 set_tid_address:218:96 setitimer:38:103 setpgid:109:154
setpriority:141:140 setrlimit:160:164 setxattr:188:5 shutdown:48:210 sigaltstack:131:132 signalfd:282:-
signalfd4:289:74 socketpair:53:199 splice:275:76 stat:4:- statfs:137:43 statx:332:291 symlink:88:- symlinkat:266:36
sync_file_range:277:84 sysinfo:99:179 tee:276:77 tgkill:234:131 time:201:- timer_create:222:107 timer_delete:226:111
timer_getoverrun:225:109 timer_gettime:224:108 timer_settime:223:110 timerfd_create:283:85 timerfd_gettime:287:87
timerfd_settime:286:86 times:100:153 tkill:200:130 truncate:76:45 umask:95:166 uname:63:160 unlink:87:-
unlinkat:263:35 utime:132:- utimensat:280:88 utimes:235:- vfork:58:- wait4:61:260 waitid:247:95 write:1:64
writev:20:66
"""
"""Calls that are allowed whatever their arguments: name, number on x86_64, number on aarch64 (- for none)."""

CHECKED = """
clone:56:220 fcntl:72:25 ioctl:16:29 personality:135:92 prlimit64:302:261 setsid:112:157 setsockopt:54:208
shmat:30:196 shmctl:31:195 shmdt:67:197 shmget:29:194 socket:41:198
"""
"""Calls that are allowed by their arguments (`_checks`)."""

REFUSED = """
acct:163:89 add_key:248:217 adjtimex:159:171 bpf:321:280 chroot:161:51 clock_adjtime:305:266
clock_settime:227:112 delete_module:176:106 fanotify_init:300:262 fanotify_mark:301:263 finit_module:313:273
fsconfig:431:431 fsmount:432:432 fsopen:430:430 fspick:433:433 init_module:175:105 io_uring_enter:426:426
io_uring_register:427:427 io_uring_setup:425:425 ioperm:173:- iopl:172:- kcmp:312:272 kexec_file_load:320:294
kexec_load:246:104 keyctl:250:219 lookup_dcookie:212:18 memfd_create:319:279 memfd_secret:447:- mount:165:40
mount_setattr:442:442 move_mount:429:429 mq_open:240:180 msgget:68:186 name_to_handle_at:303:264
nfsservctl:180:42 open_by_handle_at:304:265 open_tree:428:428 perf_event_open:298:241 pidfd_getfd:438:438
pivot_root:155:41 process_madvise:440:440 process_mrelease:448:448 process_vm_readv:310:270
process_vm_writev:311:271 ptrace:101:117 quotactl:179:60 quotactl_fd:443:443 reboot:169:142 request_key:249:218
semget:64:190 setdomainname:171:162 sethostname:170:161 setns:308:268 settimeofday:164:170
swapoff:168:225 swapon:167:224 syslog:103:116 umount2:166:39 unshare:272:97 userfaultfd:323:282 vhangup:153:58
"""
"""Calls that answer EPERM: doors into the kernel that no command needs, and calls that hold memory outside of all
limits. A program that tries one expects that it may lack the privilege."""

IDLE = """
sync:162:81 syncfs:306:267
"""
"""Calls that answer success and do nothing: a box's files lie in memory, and the host's disks are not its business."""

OWNERS = """
chown:92:- fchown:93:55 fchownat:260:54 lchown:94:- setfsgid:123:152 setfsuid:122:151 setgid:106:144
setgroups:116:159 setregid:114:143 setresgid:119:149 setresuid:117:147 setreuid:113:145 setuid:105:146
"""
"""Calls that give files or processes to other users. In a box of user 0, whose other ids do not exist, they answer
success and do nothing, as programs that install packages expect."""

COLUMNS = {"x86_64": 0, "aarch64": 1}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""First number of the x32 calls, which x86_64 has a second time."""

LOAD, EQUAL, ANY_BIT, AT_LEAST, SKIP, ANSWER = 0x20, 0x15, 0x45, 0x35, 0x05, 0x06
NUMBER_AT, AUDIT_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets in struct seccomp_data."""

ALLOW, EPERM, EINVAL, ENOSYS = 0x7FFF0000, 0x50001, 0x50016, 0x50026
EPROTONOSUPPORT, EAFNOSUPPORT = 0x5005D, 0x50061
NOTHING = 0x50000
"""Answer of a call that does nothing: error number 0."""

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
"""Families of sockets. Others are refused: vsock reaches a hypervisor, and no limit holds the queues of netlink."""
PROTOCOLS = (0, 1, 6, 17, 58)
"""Protocols of internet sockets: the default, ICMP, TCP, UDP, ICMP of version 6."""
SOL_SOCKET, SOL_TCP = 1, 6
PROGRAM_OPTIONS = (26, 50, 51, 52)
"""SO_ATTACH_FILTER, ATTACH_BPF, ATTACH_REUSEPORT_CBPF and ATTACH_REUSEPORT_EBPF: programs in the kernel."""
RECEIVE_OPTIONS, SEND_OPTIONS = (8, 33), (7, 32)
"""SO_RCVBUF and RCVBUFFORCE; SO_SNDBUF and SNDBUFFORCE. The queue of a connection that nobody has accepted is counted
for no group, so its size stays as the box sets it."""
TCP_ULP = 31
F_SETPIPE_SZ = 1031
F_OFD_LOCKS = (36, 37, 38)
"""F_OFD_GETLK, SETLK and SETLKW. No limit holds the locks of a file, and few programs ask for these; a kernel before
3.15 does not know them."""
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
SHARED_MEMORY = ("shmat", "shmctl", "shmdt", "shmget")
PERSONALITIES = (0, 0x40000, 0xFFFFFFFF)
"""The default, without address randomisation, and the question which one it is."""

Instruction = tuple[int, int, int, int]
Outcome = Union[int, "Decision"]


class Decision(NamedTuple):
    """Decision by one argument of a call, or by its number.

    Attributes:
        offset: offset of the compared value in struct seccomp_data.
        cases: values with their outcomes, an answer or a further check.
        otherwise: outcome of every other value.
        operation: comparison, `EQUAL` or `ANY_BIT`.
    """

    offset: int
    cases: tuple[tuple[int, Any], ...]
    otherwise: Any
    operation: int = EQUAL


class Rules(NamedTuple):
    """Differences between boxes.

    Attributes:
        owners: calls that change owners answer success and do nothing.
        sizes: buffers of pipes, and those that a socket sends from, may be made larger, and System V's shared memory
            may outlive its processes: a control group holds their memory.
        sessions: commands may begin sessions of their own: control groups share the processors, or programs need it.
    """

    owners: bool = False
    sizes: bool = True
    sessions: bool = True


def numbers(calls: str) -> dict[str, int]:
    """Parse a table of system calls: name -> number on this machine."""
    column = COLUMNS[platform.machine()]
    entries = (entry.split(":") for entry in calls.split())
    return {name: int(columns[column]) for name, *columns in entries if columns[column] != "-"}


def _argument(index: int) -> int:
    """Return the offset of an argument's lower 32 bits; the kernel reads no more of these arguments."""
    return ARGUMENTS_AT + 8 * index


def _checks(rules: Rules) -> dict[str, Outcome]:
    internet = Decision(_argument(2), tuple((protocol, ALLOW) for protocol in PROTOCOLS), EPROTONOSUPPORT)
    families = ((AF_UNIX, ALLOW), (AF_INET, internet), (AF_INET6, internet))
    options = PROGRAM_OPTIONS + RECEIVE_OPTIONS + (() if rules.sizes else SEND_OPTIONS)
    of_socket = Decision(_argument(2), tuple((option, EPERM) for option in options), ALLOW)
    of_tcp = Decision(_argument(2), ((TCP_ULP, EPERM),), ALLOW)
    locks = tuple((operation, EINVAL) for operation in F_OFD_LOCKS)
    terminal = tuple((request, EPERM) for request in (TIOCSTI, TIOCLINUX, TIOCSETD))
    return {
        "clone": Decision(_argument(0), ((NEW_NAMESPACES, EPERM),), ALLOW, ANY_BIT),
        # for itself alone: the box's own process has the same user, and a command could limit it
        "prlimit64": Decision(_argument(0), ((0, ALLOW),), EPERM),
        "socket": Decision(_argument(0), families, EAFNOSUPPORT),
        "setsockopt": Decision(_argument(1), ((SOL_SOCKET, of_socket), (SOL_TCP, of_tcp)), ALLOW),
        "fcntl": Decision(_argument(1), (*locks, *(() if rules.sizes else ((F_SETPIPE_SZ, EPERM),))), ALLOW),
        "ioctl": Decision(_argument(1), terminal, ALLOW),
        "personality": Decision(_argument(0), tuple((value, ALLOW) for value in PERSONALITIES), EPERM),
        "setsid": ALLOW if rules.sessions else EPERM,
        **dict.fromkeys(SHARED_MEMORY, ALLOW if rules.sizes else EPERM),
    }


def _emitted(outcome: Outcome) -> list[Instruction]:
    """Return the instructions of an outcome: operation, jump if true, jump if false, value."""
    if isinstance(outcome, int):
        return [(ANSWER, 0, 0, outcome)]
    code: list[Instruction] = [(LOAD, 0, 0, outcome.offset)]
    for value, then in outcome.cases:
        body = _emitted(then)
        code += [(outcome.operation, 0, len(body), value), *body]
    return code + _emitted(outcome.otherwise)


def _search(ranges: list[tuple[int, Outcome]]) -> list[Instruction]:
    """Return a binary search of the loaded number in ranges, each with its first number and its outcome."""
    if len(ranges) == 1:
        return _emitted(ranges[0][1])
    half = len(ranges) // 2
    low, high = _search(ranges[:half]), _search(ranges[half:])
    return [(AT_LEAST, 0, 1, ranges[half][0]), (SKIP, 0, 0, len(low)), *low, *high]


def filter_program(rules: Rules = Rules()) -> tuple[Any, bytes]:
    """Return a seccomp program (struct sock_fprog), and the memory that it points to."""
    outcomes: dict[int, Outcome] = {}
    owners: Outcome = NOTHING if rules.owners else ALLOW
    for calls, outcome in ((ALLOWED, ALLOW), (REFUSED, EPERM), (IDLE, NOTHING), (OWNERS, owners)):
        outcomes.update(dict.fromkeys(numbers(calls).values(), outcome))
    checks = _checks(rules)
    outcomes.update({number: checks[name] for name, number in numbers(CHECKED).items()})
    ranges: list[tuple[int, Outcome]] = []
    for number in range(max(outcomes) + 2):
        outcome = outcomes.get(number, ENOSYS)
        if not ranges or ranges[-1][1] != outcome:
            ranges.append((number, outcome))
    ranges.append((X32, EPERM))
    audit = AUDIT[platform.machine()]
    head = [(LOAD, 0, 0, AUDIT_AT), (EQUAL, 1, 0, audit), (ANSWER, 0, 0, EPERM), (LOAD, 0, 0, NUMBER_AT)]
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in head + _search(ranges))
    memory = ctypes.create_string_buffer(code)
    return memory, struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
