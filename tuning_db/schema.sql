-- schema.sql: the tables of a tuning database, version 3.
--
-- A file is used only if it holds exactly these tables and indexes (comments and spacing aside), so
-- a change here needs a new user_version and, in db_schema.c, a step that leads from the old one.
-- Numbers are bounded on both sides: SQLite orders texts above all numbers, so a text never passes.

PRAGMA application_id = 1398232136; -- the letters SWTH
PRAGMA user_version = 3;

-- What the file says about itself. Never changes its shape: newer files are asked for written_by.
CREATE TABLE meta (
  name TEXT PRIMARY KEY NOT NULL,
  value TEXT NOT NULL
);

-- Where rows were measured. isa decides whether a row can be used at all.
CREATE TABLE environment (
  id INTEGER PRIMARY KEY NOT NULL,
  text TEXT NOT NULL UNIQUE CHECK (length(text) BETWEEN 1 AND 255), -- made of the rest
  isa TEXT NOT NULL,
  processor TEXT NOT NULL,
  threads INTEGER NOT NULL CHECK (threads BETWEEN 1 AND 1000000)
);

-- One layer's shape. Problems of one family differ only in tokens_per_rank, ranks and layout; the
-- family's text is a problem's with those three at fixed values.
CREATE TABLE problem (
  id INTEGER PRIMARY KEY NOT NULL,
  text TEXT NOT NULL UNIQUE CHECK (length(text) BETWEEN 1 AND 511), -- canonical
  family TEXT NOT NULL CHECK (length(family) BETWEEN 1 AND 511),
  tokens_per_rank INTEGER NOT NULL CHECK (tokens_per_rank BETWEEN 1 AND 9223372036854775807)
);
CREATE INDEX problem_by_family ON problem (family, tokens_per_rank);

-- One run of the tuner.
CREATE TABLE session (
  id INTEGER PRIMARY KEY NOT NULL,
  command TEXT NOT NULL,
  budget_s REAL NOT NULL CHECK (budget_s BETWEEN 0 AND 1e12),
  written_by TEXT NOT NULL,
  started_at TEXT NOT NULL  -- UTC, ISO 8601
);

-- One candidate measured once. Never changed, never removed: picks can be made again from samples.
CREATE TABLE sample (
  id INTEGER PRIMARY KEY NOT NULL,
  session INTEGER NOT NULL REFERENCES session (id),
  problem INTEGER NOT NULL REFERENCES problem (id),
  kernel TEXT NOT NULL CHECK (length(kernel) BETWEEN 1 AND 63),
  environment INTEGER NOT NULL REFERENCES environment (id),
  generator TEXT NOT NULL,  -- digest of the texts the kernel was made from
  config TEXT NOT NULL CHECK (length(config) <= 511),
  verdict TEXT NOT NULL CHECK (verdict IN ('ok', 'wrong', 'compile', 'crash', 'timeout', 'oom')),
  words TEXT NOT NULL,      -- why, or ''
  runs_us TEXT NOT NULL,    -- every timing: [12.5,12.75,...]
  default_runs_us TEXT,     -- of the default, run by run beside them. NULL: not paired
  runs INTEGER NOT NULL CHECK (runs BETWEEN 0 AND 1000000),
  median_us REAL NOT NULL CHECK (median_us BETWEEN 0 AND 1e15),
  ratio REAL NOT NULL CHECK (ratio BETWEEN 0 AND 1e15),  -- to the default. 0: not measured
  noisy INTEGER NOT NULL CHECK (noisy IN (0, 1)),  -- 1: others used the machine meanwhile
  written_at TEXT NOT NULL
);
CREATE INDEX sample_by_config ON sample (problem, kernel, environment, config);
CREATE INDEX sample_by_session ON sample (session);

-- What a layer should use, one for each problem, kernel and environment.
CREATE TABLE pick (
  id INTEGER PRIMARY KEY NOT NULL,
  problem INTEGER NOT NULL REFERENCES problem (id),
  kernel TEXT NOT NULL CHECK (length(kernel) BETWEEN 1 AND 63),
  environment INTEGER NOT NULL REFERENCES environment (id),
  generator TEXT NOT NULL,
  config TEXT NOT NULL CHECK (length(config) <= 511),
  best_us REAL NOT NULL CHECK (best_us > 0 AND best_us <= 1e15),
  default_us REAL NOT NULL CHECK (default_us > 0 AND default_us <= 1e15),
  ratio REAL NOT NULL CHECK (ratio > 0 AND ratio <= 1e15),
  limit_share REAL NOT NULL CHECK (limit_share BETWEEN 0 AND 1e15),  -- of the peak. 0: not known
  complete INTEGER NOT NULL CHECK (complete IN (0, 1)),  -- 0: the search was cut short
  session INTEGER NOT NULL REFERENCES session (id),
  sample INTEGER REFERENCES sample (id),                 -- the newest that measured this config
  written_at TEXT NOT NULL,
  UNIQUE (problem, kernel, environment)
);
