// check_report.h: prints what check.h found.
#ifndef CLI_CHECK_REPORT_H
#define CLI_CHECK_REPORT_H

#include "check.h"
#include "report.h"

void cli_check_report_print(const struct cli_check *check);
json_t *cli_check_report_json(const struct cli_check *check);

#endif
