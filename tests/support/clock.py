"""A clock that is wrong: a library, put in front of the C library's, that adds seconds to the time of day.

The seconds are read from a file at each call, so that the clock of a running process can be set. The monotonic clock,
which measures and never tells the time, is left alone, as on a machine whose date is wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    char text[32] = {0};
    int file = open(getenv("FAKE_CLOCK"), O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    long size = read(file, text, sizeof text - 1);
    close(file);
    return size > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""


class WrongClock:
    """The clock of the processes that are started with its environment."""

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "seconds", folder / "clock.so"
        (folder / "clock.c").write_text(SOURCE)
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler: the clock of a process cannot be set")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(folder / "clock.c"), "-ldl"]
        subprocess.run(command, check=True)
        self.set(0)

    def set(self, seconds: int) -> None:
        """How far it is ahead; it is never half-written."""
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(str(seconds))
        os.replace(temporary, self._file)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "FAKE_CLOCK": str(self._file)}
