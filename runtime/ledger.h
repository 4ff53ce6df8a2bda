// ledger.h: what a search keeps in the database and takes up from it again: its candidates with
// their verdicts, their samples, and the pick.
#ifndef SW_LEDGER_H
#define SW_LEDGER_H

#include "layer.h"
#include "search.h"

struct sw_ledger {
  // borrowed, and set by whoever searches
  struct swathe_context *context;
  struct sw_db *db;
  int64_t session;
  struct sw_gen_request request;              // whose configs the candidates are
  const struct sw_db_environment *environment;
  struct swathe_tuned *tuned;                 // what this call found and counted
  double limit_us;                            // no config can be faster; 0: not known

  struct sw_search_candidate *candidates;     // [0] is the default; texts are ours
  int64_t count, capacity;
  bool *counted;                              // [capacity]: in `tried` already
  int64_t tried;                              // with a verdict, earlier sessions' included
  struct sw_db_held held;                     // the pick that the database has
};

// The default comes first, and once.
enum swathe_status sw_ledger_add(struct sw_ledger *ledger, const char *config);
void sw_ledger_free(struct sw_ledger *ledger);

// Reads the stored pick, if it is still in the space.  *done: it is the end of a search that had
// `budget_s` or more (INFINITY: none had), for these very kernels; `tuned` has it then.
enum swathe_status sw_ledger_recall_pick(struct sw_ledger *ledger, double budget_s, bool *done);
// Takes up the verdicts of earlier sessions, the default's aside: that is timed anew in each.
enum swathe_status sw_ledger_recall(struct sw_ledger *ledger);
// Tells the search its candidates and who holds the pick; the rest is the caller's.
void sw_ledger_start(const struct sw_ledger *ledger, struct sw_search *search);

enum swathe_status sw_ledger_put_failure(struct sw_ledger *ledger, int64_t candidate,
                                         enum sw_verdict verdict, const char *words);
enum swathe_status sw_ledger_note(struct sw_ledger *ledger, const struct sw_search_runs *runs);
// Stores who leads: until the search is over, only if there is no finished pick.
enum swathe_status sw_ledger_lead(struct sw_ledger *ledger, const struct sw_search *search);
// Stores what a search ended with, which went well if `status` says so, and tells it in `tuned`.
enum swathe_status sw_ledger_end(struct sw_ledger *ledger, const struct sw_search *search,
                                 enum swathe_status status);

// The best time's share of the limit; 0: not known.
double sw_ledger_limit_share(const struct sw_ledger *ledger, const struct sw_search *search);

#endif
