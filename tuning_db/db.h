// db.h: the tuning database as the rest of the library sees it.  sqlite3.h only in tuning_db/.
//
// Rows are data: config texts are validated by the generator before anything is made from them.
#ifndef SW_DB_H
#define SW_DB_H

#include "../runtime/problem.h"

struct sw_db;

enum sw_db_access {
  SW_DB_READ,   // never creates or writes; a file that is not there gives an empty database
  SW_DB_WRITE,  // creates and migrates; one writer at a time, others wait a bounded time
};
// SWATHE_DATABASE: not a database, from a newer swathe, damaged, or holds triggers or views.
enum swathe_status sw_db_open(const char *path, enum sw_db_access access, struct sw_db **db);
void sw_db_close(struct sw_db *db);

// Where a row was measured.  For a row to be used its isa must match; the rest is told, and orders
// rows that are equally near.
struct sw_db_environment {
  const char *isa;            // hard
  const char *processor;      // model name
  int32_t threads;            // hard
  const char *generator;      // digest of the generator's texts
};
// "isa=…,processor=…,threads=…"; returns the needed length.
size_t sw_db_environment_format(const struct sw_db_environment *environment, char *text,
                                size_t size);

// A tuning session; samples belong to it.
enum swathe_status sw_db_session_begin(struct sw_db *db, const char *command, double budget_s,
                                       int64_t *session);

struct sw_db_row {
  const struct swathe_problem *problem;
  const char *kernel;
  const struct sw_db_environment *environment;
  const char *config;
};
struct sw_db_sample {
  const char *verdict, *words;    // as swathe_sample
  const double *runs_us;          // every timing
  const double *default_runs_us;  // the paired timing of the default; NULL when not paired
  int64_t runs;
  double median_us, ratio;
  bool noisy;                     // others used the machine meanwhile
};
enum swathe_status sw_db_put_sample(struct sw_db *db, int64_t session, const struct sw_db_row *row,
                                    const struct sw_db_sample *sample);
// Replaces the pick of (problem, kernel, environment).  `complete`: the search ended by itself;
// otherwise the next call resumes.
struct sw_db_pick {
  double best_us, default_us, ratio;
  double limit_share;             // as swathe_pick
  bool complete;
};
enum swathe_status sw_db_put_pick(struct sw_db *db, int64_t session, const struct sw_db_row *row,
                                  const struct sw_db_pick *pick);

// A candidate for the look-up ladder.
struct sw_db_found {
  struct swathe_problem problem;  // the row's own
  char config[512];
  double ratio;
  bool exact;                     // same problem, same isa and threads
  bool complete;
  char environment[256], when[32];
};
// The exact pick (first, if there is one), then picks of problems that differ only in
// tokens_per_rank, ranks, layout or threads, nearest tokens_per_rank first.  Visit returns false to
// stop.
typedef bool sw_db_found_visit(void *arg, const struct sw_db_found *found);
enum swathe_status sw_db_find(struct sw_db *db, const struct swathe_problem *problem,
                              const char *kernel, const struct sw_db_environment *environment,
                              sw_db_found_visit *visit, void *arg);

// The verdicts already known for this row's problem, kernel and environment, for resuming.
typedef void sw_db_known_visit(void *arg, const char *config, const char *verdict, double median_us,
                               double ratio);
enum swathe_status sw_db_known(struct sw_db *db, const struct sw_db_row *row,
                               sw_db_known_visit *visit, void *arg);

// The pick of this very row (its config aside), for the tuner; only of a database open for writing.
// `found` is false if there is none.
struct sw_db_held {
  bool found;
  char config[512];
  double ratio, limit_share;
  bool complete;
  bool current;                   // made from the row's very generator
  bool quiet;                     // the sample it rests on is not noisy, and as current
  double budget_s;                // of the session that made it
};
enum swathe_status sw_db_held(struct sw_db *db, const struct sw_db_row *row,
                              struct sw_db_held *held);

enum swathe_status sw_db_list(struct sw_db *db, swathe_pick_visit *visit, void *arg);
// `problem` NULL: of every problem, in the order of swathe_db_samples; else best first.
enum swathe_status sw_db_samples(struct sw_db *db, const struct swathe_problem *problem,
                                 swathe_sample_visit *visit, void *arg);

// For doctor: schema version, picks and samples.
struct sw_db_state { int32_t schema_version; int64_t picks, samples; };
enum swathe_status sw_db_state(struct sw_db *db, struct sw_db_state *state);

#endif
