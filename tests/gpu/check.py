"""Runs every check that wants a GPU, on the driver that is there, and writes one file of results.

    python3 check.py TREE OUT      TREE: a build, or what `scripts/gpu-check prepare` made of one
    python3 check.py --programs    the test programs that this runs

The driver is $SWATHE_LIBCUDA, else libcuda.so.1.  When it is the emulated one each step is reduced
and every line of the results says EMULATED: nothing in them is a measurement.  The file is text,
then a line "---- json" and the same as one JSON document.
"""

import concurrent.futures
import datetime
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

try:
    import sqlite3
except ImportError:  # some pythons are built without
    sqlite3 = None

ALL_S = 470  # of all steps together
SOURCES = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

# Programs, their arguments and which of their tests run: on a device, and emulated (None: left to
# ctest, which runs all of them on the emulated driver).
TESTS = (
    ("test_kernels_cuda", (), "*", "keys_are_packed"),
    ("test_layer_cuda", (), "*", "the_callers_stream_is_used"),
    ("test_cases", ("cuda",), "*", "b06_*"),
    ("test_property", (), "*_on_cuda", None),
    ("test_nvrtc", (), "*", None),
)
PROGRAMS = ["test_conformance", "gpu_overlap"] + [test[0] for test in TESTS]

# Whole layers against the reference: two ranks on one device, each preset's shape, few tokens.
CHECKED = (
    "--model gpt-oss-20b --tokens 1500 --ranks 2 --layout zigzag",
    "--model gemma-3-27b --tokens 2500 --ranks 2",
    "--model mimo-v2-flash --tokens 700 --ranks 2 --layout zigzag",
    "--model gemma-3-1b --tokens 1200 --ranks 3",
    "--model gemma-2-27b --tokens 600 --ranks 2",
    "--model modernbert-base --tokens 500 --ranks 3 --layout zigzag",
    "--model gpt-oss-20b --dtype f16 --documents 300,77,900 --ranks 4 --layout zigzag-doc",
)
CHECKED_EMULATED = ("--problem q_heads=4,kv_heads=2,sinks=1 --dtype bf16 --window 40 --tokens 200"
                    " --ranks 2 --layout zigzag",)

SANITIZED = (
    "--problem q_heads=8,kv_heads=2,sinks=1 --dtype bf16 --window 128 --tokens 400 --ranks 2",
    "--problem q_heads=4,kv_heads=2,head_dim_qk=128,head_dim_v=128 --dtype f16 --window 90"
    " --tokens 300 --ranks 2 --layout zigzag",
)

# Tuned, compared and overlapped: one rank's share of these.
MODELS = ("gpt-oss-20b", "gemma-3-27b", "mimo-v2-flash")
SHARE = {"ranks": 8, "tokens_per_rank": 16384, "layout": "contiguous", "target": "cuda"}
TINY = ("q_heads=4,kv_heads=2,head_dim_qk=64,head_dim_v=64,window_left=63,window_right=0,"
        "dtype=bf16,sinks=1,target=cuda,ranks=8,tokens_per_rank=256")
TUNE_S = 36  # of a model
DELAYS_US = ("0", "20", "50", "100", "200", "400")


class Skip(Exception):
    """Why a step cannot be made here."""


class Failed(Exception):
    """Why a step did not come out well; what it found until then stays."""


def run(argv, limit_s, **environment):
    """Exit status (None: it ran past its limit and was killed), stdout and stderr."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               errors="replace", env={**os.environ, **environment},
                               start_new_session=True)
    try:
        out, err = process.communicate(timeout=max(limit_s, 1))
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err


def end_of(text, lines=12):
    return [line[:160] for line in text.strip().splitlines()[-lines:]]


def find_python():
    """One that has PyTorch."""
    for python in (sys.executable, "/usr/bin/python3"):
        if run([python, "-c", "import torch"], 60)[0] == 0:
            return python
    return None


class Check:
    def __init__(self, tree, out):
        self.tree, self.out = os.path.realpath(tree), os.path.realpath(out)
        self.command = os.path.join(self.tree, "swathe")
        self.began = time.monotonic()
        self.lines, self.steps, self.facts = [], [], {}
        self.emulated, self.device, self.python = False, "unknown", None
        self.findings, self.problems = {}, {}
        os.environ.setdefault("SWATHE_CACHE_DIR", os.environ.get("TEST_CACHE_DIR")
                              or os.path.join(tempfile.gettempdir(), "swathe-gpu-check"))
        self.cache = os.environ["SWATHE_CACHE_DIR"]
        libraries = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = self.tree + (":" + libraries if libraries else "")

    # -- words and limits

    def say(self, line=""):
        self.lines.append(f"EMULATED  {line}".rstrip() if self.emulated else line)
        print(self.lines[-1], flush=True)

    def left_s(self):
        return ALL_S - (time.monotonic() - self.began)

    def step(self, name, limit_s, make):
        """make(limit_s, found) puts what it learns into found and says lines."""
        limit_s = min(limit_s, self.left_s())
        record = {"step": name, "grade": "emulated" if self.emulated else "on a device",
                  "found": {}}
        began = time.monotonic()
        self.say()
        self.say(f"== {name}")
        try:
            if limit_s < 3:
                raise Skip("no time was left")
            make(limit_s, record["found"])
            record["verdict"] = "passed"
        except Skip as why:
            record["verdict"], record["why"] = "skipped", str(why)
        except Failed as why:
            record["verdict"], record["why"] = "failed", str(why)
        except Exception as why:  # ours or a machine's: the rest goes on
            record["verdict"], record["why"] = "failed", f"{type(why).__name__}: {why}"
        record["took_s"] = round(time.monotonic() - began, 1)
        self.say(f"{name}: {record['verdict']} in {record['took_s']} s"
                 + (f": {record['why']}" if "why" in record else ""))
        self.steps.append(record)
        self.save()  # so that little is lost if all of this is killed
        return record["verdict"]

    def ask_doctor(self):
        """Its findings by their names, and which driver this is."""
        out = run([self.command, "doctor", "--json"], 30)[1]
        self.findings = {row["what"]: row for row in json.loads(out)["findings"]} if out else {}
        self.emulated = self.finding("cuda driver").startswith("emulated")

    def finding(self, what, key="found"):
        return self.findings.get(what, {}).get(key, "not looked for")

    # -- steps

    def look(self, limit_s, found):
        """What is here; without a driver nothing else can be done."""
        found["swathe"] = self.told([self.command, "--version"])
        try:
            with open(os.path.join(self.tree, "commit"), encoding="utf-8") as file:
                found["commit"] = file.read().strip()
        except OSError:
            found["commit"] = run(["git", "-C", SOURCES, "describe", "--always", "--dirty"],
                                  10)[1].strip() or "unknown"
        found["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.python = find_python()
        if self.finding("cuda compiler", "state") != "ok" and self.bring_compiler():
            self.ask_doctor()
        for name, what in (("driver", "cuda driver"), ("compiler", "cuda compiler"),
                           ("processors", "processor")):
            found[name] = self.finding(what)
        name = re.search(r"the first (.*), compute", found["driver"])
        self.device = name.group(1) if name else "no device"
        found["device"] = self.device
        if not self.emulated:
            fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
            found["nvidia_smi"] = self.told(["nvidia-smi", f"--query-gpu={fields}",
                                             "--format=csv,noheader"])
            found["nvcc"] = self.told(["nvcc", "--version"])
        found["torch"] = self.told([self.python, "-c", "import torch; print(torch.__version__)"]
                                   ) if self.python else "not here"
        for key, value in found.items():
            self.say(f"{key:12}{value}")
        if self.finding("cuda driver", "state") != "ok":
            raise Failed("there is no CUDA driver")
        if self.finding("cuda compiler", "state") != "ok":
            raise Failed("there is no NVRTC; $SWATHE_LIBNVRTC can name one")

    def bring_compiler(self):
        """PyTorch brings an NVRTC of its own."""
        script = ("import glob, os, torch; print((glob.glob(os.path.join(os.path.dirname("
                  "torch.__file__), '..', 'nvidia', '*', 'lib', 'libnvrtc.so.*')) + [''])[0])")
        path = self.told([self.python, "-c", script]) if self.python else ""
        if os.path.exists(path):
            os.environ["SWATHE_LIBNVRTC"] = path
        return os.path.exists(path)

    @staticmethod
    def told(argv):
        try:
            lines = run(argv, 30)[1].strip().splitlines()
        except OSError:
            return "not here"
        return lines[-1] if lines else "says nothing"

    def test_environment(self, pattern):
        driver = os.environ.get("SWATHE_LIBCUDA") or "libcuda.so.1"
        return {"TEST_SOURCE_DIR": SOURCES, "TEST_COMMAND": self.command, "TEST_LIBCUDA": driver,
                "TEST_CACHE_DIR": self.cache, "TEST_FILTER": pattern}

    def run_one(self, program, arguments, name, until):
        """One test of a cmocka program, or those that a pattern names."""
        status, out, err = run([os.path.join(self.tree, "tests", program), *arguments],
                               until - time.monotonic(), **self.test_environment(name))
        text = out + err
        passed = len(re.findall(r"^\[ +OK \] ", text, re.M))
        skipped = sorted(set(re.findall(r"^\[ +SKIPPED +\] ([a-z]\w+)$", text, re.M)))
        return {"name": name, "status": status, "passed": passed, "skipped": skipped,
                "words": end_of(text, 30) if status != 0 else []}

    def tell_program(self, program, results, found):
        """What came of its tests; True if some passed and none failed."""
        passed = sum(result["passed"] for result in results)
        skipped = sorted({name for result in results for name in result["skipped"]})
        wrong = [result for result in results if result["status"] != 0]
        found[program] = {"passed": passed, "skipped": skipped, "failed": wrong}
        self.say(f"{program}: {passed} passed" + (f", skipped: {' '.join(skipped)}" if skipped
                                                  else ""))
        for result in wrong:
            self.say(f"    {result['name']}: " + ("killed at the limit" if result["status"] is None
                                                  else f"FAILED ({result['status']})"))
            for line in result["words"]:
                self.say("        " + line)
        return bool(passed) and not wrong

    @staticmethod
    def names(program, pattern):
        """The program's tests that match; of a group that is not run none will be."""
        with open(os.path.join(SOURCES, "tests", program + ".c"), encoding="utf-8") as file:
            lines = [line for line in file if not line.startswith("#")]
        names = re.findall(r"\b(?:cmocka_unit_test\w*|TEST)\((\w+)", "".join(lines))
        return fnmatch.filter(dict.fromkeys(names), pattern)

    def conform(self, limit_s, found):
        result = self.run_one("test_conformance", (), "*", time.monotonic() + limit_s)
        if not self.tell_program("test_conformance", [result], found):
            raise Failed("primitives differ from the emulator's results")

    def check_layer(self, options, until):
        status, out, err = run([self.command, "run", "--target", "cuda", "--check", "--json",
                                *options.split()], until - time.monotonic())
        return {"options": options, "status": status,
                "words": end_of(err or out) if status != 0 else []}

    def test(self, limit_s, found):
        """Test programs, on a device each test a process beside the others; and whole layers."""
        until, wrong = time.monotonic() + limit_s, []
        chosen = {program: [few] if self.emulated else self.names(program, pattern)
                  for program, _, pattern, few in TESTS if few is not None or not self.emulated}
        layers = CHECKED_EMULATED if self.emulated else CHECKED
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {program: [pool.submit(self.run_one, program, arguments, name, until)
                                 for name in chosen[program]]
                       for program, arguments, _, _ in TESTS if program in chosen}
            checked = [pool.submit(self.check_layer, options, until) for options in layers]
        for program, results in running.items():
            if not self.tell_program(program, [one.result() for one in results], found):
                wrong.append(program)
        found["layers"] = [one.result() for one in checked]
        for layer in found["layers"]:
            status = layer["status"]
            self.say(f"run {layer['options']}: " + ("equals the reference" if status == 0 else
                     "killed at the limit" if status is None else f"FAILED ({status})"))
            for line in layer["words"]:
                self.say("    " + line)
            if status != 0:
                wrong.append("run " + layer["options"])
        if not self.emulated:
            self.say("test_device_cuda, test_emulator: of the emulated driver alone")
        if wrong:
            raise Failed("; ".join(wrong))

    def sanitize(self, limit_s, found):
        if self.emulated:
            raise Skip("compute-sanitizer needs a device; the emulator has checks of its own")
        sanitizer = next((path for path in ("compute-sanitizer",
                                            "/usr/local/cuda/bin/compute-sanitizer")
                          if self.told([path, "--version"]) != "not here"), None)
        if not sanitizer:
            raise Skip("compute-sanitizer is not here")
        until, wrong = time.monotonic() + limit_s, []
        for tool in ("memcheck", "racecheck", "synccheck"):
            for options in SANITIZED:
                status, out, err = run([sanitizer, "--tool", tool, "--error-exitcode", "9",
                                        self.command, "run", "--target", "cuda", "--check",
                                        *options.split()], until - time.monotonic())
                found[f"{tool} {options}"] = status
                self.say(f"{tool}: run {options}: " + ("clean" if status == 0 else
                         "killed at the limit" if status is None else f"FAILED ({status})"))
                if status != 0:
                    wrong.append(tool)
                    for line in end_of(out + err, 20):
                        self.say("    " + line)
        if wrong:
            raise Failed(" ".join(wrong))

    def problem(self, model):
        """One rank's share of a model, as canonical text."""
        out = run([self.command, "models", model, "--json"], 30)[1]
        text = json.loads(out)["models"][0]["problem"]["text"]
        fields = dict(field.split("=") for field in text.split(","))
        fields.update({name: str(value) for name, value in SHARE.items()})
        return ",".join(f"{name}={value}" for name, value in fields.items())

    def tune(self, limit_s, found):
        until, wrong = time.monotonic() + limit_s, []
        budget_s = 6 if self.emulated else TUNE_S
        for name, problem in self.problems.items():
            left_s = until - time.monotonic()
            if left_s < 5:
                wrong.append(f"{name}: no time was left")
                continue
            status, out, err = run([self.command, "tune", "--problem", problem, "--budget",
                                    str(min(budget_s, int(left_s))), "--database", self.database,
                                    "--json"] + (["--forward"] if self.emulated else []), left_s)
            if status != 0:
                wrong.append(name)
                for line in end_of(err + out):
                    self.say("    " + line)
                continue
            found[name] = json.loads(out)
            for row in found[name]["kernels"]:
                if not row["config"]:
                    wrong.append(f"{name} {row['kernel']}: nothing was measured to the end")
                    continue
                self.say(f"{name} {row['kernel']}: {row['best_us']:.1f} us, the default "
                         f"{row['default_us']:.1f} us; {row['tried']} tried, {row['rejected']} "
                         f"wrong, {row['failed']} failed")
                self.say(f"    {row['config']}")
                if row["rejected"]:
                    wrong.append(f"{name}: a candidate's results were wrong")
        if wrong:
            raise Failed("; ".join(wrong))

    def compare(self, limit_s, found):
        if not self.python:
            raise Skip("no python3 here has PyTorch")
        named = [f"{name}={problem}" for name, problem in self.problems.items()]
        status, out, err = run([self.python, os.path.join(SOURCES, "tests", "gpu", "compare.py"),
                                os.path.join(self.tree, "libswathe.so.0")]
                               + (["--emulated"] if self.emulated else []) + named, limit_s,
                               SWATHE_DB=self.database)
        found["records"] = [json.loads(line) for line in out.splitlines() if line[:1] == "{"]
        for record in found["records"]:
            self.say(record["line"])
        if status == 3:
            raise Skip("PyTorch sees no GPU")
        if status != 0:
            for line in end_of(err):
                self.say("    " + line)
            raise Failed("killed at the limit: what stands here came before" if status is None
                         else "a result is off, or it broke off")

    def overlap(self, limit_s, found):
        """On one GPU there is no wire: a delayed copy stands for the neighbours."""
        self.say("emulates overlap on a single GPU: the neighbours are a delayed copy")
        until = time.monotonic() + limit_s
        for name, problem in self.problems.items():
            runs, delays = ("2", DELAYS_US[:2]) if self.emulated else ("30", DELAYS_US)
            status, out, err = run([os.path.join(self.tree, "tests", "gpu_overlap"), problem, runs,
                                    *delays], until - time.monotonic(), SWATHE_DB=self.database)
            if status != 0:
                for line in end_of(err):
                    self.say("    " + line)
                raise Failed(f"{name}: " + ("killed at the limit" if status is None
                                            else "it failed"))
            found[name] = json.loads(out)
            for direction in ("forward", "backward"):
                part = found[name][direction]
                self.say(f"{name} {direction}: muted {part['muted_us']:.1f} us; " + "; ".join(
                    f"halo there after {row['wire_us']:.1f}: {row['exposed_us']:+.1f}"
                    for row in part["delays"]) + " us")

    # -- all

    def file_name(self):
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return f"{date}-{re.sub('[^A-Za-z0-9._-]+', '-', self.device)}"

    def fresh_database(self):
        self.database = os.path.join(self.out, self.file_name() + ".db")
        for ending in ("", ".lease", "-shm", "-wal"):
            if os.path.exists(self.database + ending):
                os.remove(self.database + ending)

    def fold_database(self):
        """Into one file, that can be published; without sqlite3 its log stays beside it."""
        if not sqlite3 or not os.path.exists(self.database):
            return
        database = sqlite3.connect(self.database)
        busy = database.execute("PRAGMA journal_mode=DELETE").fetchone()[0] != "delete"
        database.close()
        if not busy and os.path.exists(self.database + ".lease"):
            os.remove(self.database + ".lease")

    def conclude(self):
        verdicts = [step["verdict"] for step in self.steps]
        self.say()
        self.say(f"{verdicts.count('passed')} steps passed, {verdicts.count('failed')} failed, "
                 f"{verdicts.count('skipped')} skipped, in {ALL_S - self.left_s():.0f} s")
        print(f"written to {self.save()}")
        return "failed" not in verdicts

    def save(self):
        path = os.path.join(self.out, self.file_name() + ".txt")
        grade = ("EMULATED" if self.emulated else
                 "nothing ran" if self.device == "no device" else "measured")
        document = {"device": self.device, "grade": grade,
                    "steps": self.steps}
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(self.lines) + "\n---- json\n")
            json.dump(document, file, indent=1)
            file.write("\n")
        return path

    def all(self):
        os.makedirs(self.out, exist_ok=True)
        self.ask_doctor()
        if self.step("what is here", 60, self.look) == "passed":
            self.fresh_database()
            self.problems = ({"tiny": TINY} if self.emulated
                             else {model: self.problem(model) for model in MODELS})
            self.step("primitives against the emulator's results", 40, self.conform)
            self.step("correctness tests", 140, self.test)
            self.step("compute-sanitizer", 50, self.sanitize)
            self.step("tuning", 3 * TUNE_S + 12, self.tune)
            self.step("beside PyTorch on the same tensors", 110, self.compare)
            self.step("overlap, emulated on a single GPU", 30, self.overlap)
            self.fold_database()
        return self.conclude()


def main():
    if sys.argv[1:] == ["--programs"]:
        print("\n".join(PROGRAMS))
        return 0
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    return 0 if Check(sys.argv[1], sys.argv[2]).all() else 1


if __name__ == "__main__":
    sys.exit(main())
