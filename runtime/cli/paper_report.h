// paper_report.h: what `swathe plan --link` says.
#ifndef CLI_PAPER_REPORT_H
#define CLI_PAPER_REPORT_H

#include "paper.h"

#include <jansson.h>

// The strategies on paper, here and over other numbers of ranks.
enum cli_exit cli_paper_report_print(const struct cli_given *given,
                                     const struct cli_paper_cluster *cluster);
// The same as an object.
enum cli_exit cli_paper_report_json(const struct cli_given *given,
                                    const struct cli_paper_cluster *cluster, json_t **object);

#endif
