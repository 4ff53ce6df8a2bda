// context.c: opens the specialists (generator, compiler cache, database), keeps the kernels that
// were loaded, and answers what needs no ranks: presets, sources, config spaces, what is compiled.
#include "layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

const double sw_compile_deadline_s = 120;

const char *sw_context_kernel_name(enum swathe_direction direction)
{
  return direction == SWATHE_FORWARD ? "forward" : "backward";
}

// ---- Open and close -----------------------------------------------------------------------------

static char *copy_text(const char *text) { return text ? strdup(text) : NULL; }

static const char *setting(const char *option, const char *variable)
{
  if (option) return option;
  const char *value = getenv(variable);
  return value && *value ? value : NULL;
}

// A misspelt variable would be ignored in silence.
static void warn_unknown_variables(void)
{
  static const char *const known[] = {
    "SWATHE_DB",   "SWATHE_CACHE_DIR", "SWATHE_ISA",      "SWATHE_CC",      "SWATHE_GENERATOR_DIR",
    "SWATHE_ARCH", "SWATHE_LIBCUDA",   "SWATHE_LIBNVRTC", "SWATHE_LIBNCCL",
    "SWATHE_MPI_PLUGIN", "SWATHE_CACHE_MIB",
  };
  for (char **variable = environ; *variable; variable++) {
    bool found = strncmp(*variable, "SWATHE_", 7) != 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
      const size_t length = strlen(known[i]);
      found |= !strncmp(*variable, known[i], length) && (*variable)[length] == '=';
    }
    if (!found)
      sw_warn("environment variable %.*s is not one of swathe's; it has no effect",
              (int)strcspn(*variable, "="), *variable);
  }
}

// The first "model name" of /proc/cpuinfo; provenance only.
static void read_processor(char *text, size_t size)
{
  char line[256];
  FILE *file = fopen("/proc/cpuinfo", "re");

  snprintf(text, size, "unknown");
  while (file && fgets(line, sizeof line, file)) {
    const char *value = strchr(line, ':');
    if (strncmp(line, "model name", 10) || !value) continue;
    value += 1 + strspn(value + 1, " ");
    snprintf(text, size, "%.*s", (int)strcspn(value, "\n"), value);
    break;
  }
  if (file) fclose(file);
}

static void collect_isa(void *arg, const char *isa, const char *flags)
{
  struct sw_isa_names *isas = arg;
  (void)flags;
  if (isas->count == SW_ISAS) return;
  snprintf(isas->names[isas->count], sizeof isas->names[0], "%s", isa);
  isas->list[isas->count] = isas->names[isas->count];
  isas->count++;
}

enum swathe_status sw_context_isas(struct swathe_context *context, enum swathe_target target,
                                   struct sw_isa_names *isas)
{
  isas->count = 0;
  pthread_mutex_lock(&context->mutex);
  const enum swathe_status status = sw_gen_isas(context->gen, target, collect_isa, isas);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

static enum swathe_status choose_isa(struct swathe_context *context, const char *wanted)
{
  struct sw_isa_names isas;
  enum swathe_status status = sw_context_isas(context, SWATHE_CPU, &isas);
  if (status) return status;

  const char *best =
      wanted ? sw_device_cpu_isa(&wanted, 1) : sw_device_cpu_isa(isas.list, isas.count);
  if (!best)
    return sw_fail(SWATHE_UNSUPPORTED, "this processor cannot run isa '%s'",
                   wanted ? wanted : "any that is known");
  for (int32_t i = 0; i < isas.count; i++) {
    if (strcmp(isas.list[i], best)) continue;
    snprintf(context->isa, sizeof context->isa, "%s", best);
    return SWATHE_OK;
  }
  return sw_fail(SWATHE_BAD_USE, "no isa of the cpu target is called '%s'", best);
}

static char *database_path(struct swathe_context *context, const char *option)
{
  const char *path = setting(option, "SWATHE_DB");
  const char *directory = sw_jit_directory(context->jit);
  char *text = NULL;

  if (path) return strdup(path);
  if (!*directory) return strdup("");
  return asprintf(&text, "%s/tuning.db", directory) < 0 ? NULL : text;
}

void sw_context_reopen_database(struct swathe_context *context)
{
  pthread_mutex_lock(&context->mutex);
  if (context->db) sw_db_close(context->db);
  context->db = NULL;
  context->db_failed =
      *context->database && sw_db_open(context->database, SW_DB_READ, &context->db);
  if (context->db_failed)
    snprintf(context->db_words, sizeof context->db_words, "%s", swathe_error());
  pthread_mutex_unlock(&context->mutex);
}

enum swathe_status swathe_open(const struct swathe_options *options,
                               struct swathe_context **context_out)
{
  static const struct swathe_options defaults;
  struct swathe_context *context = calloc(1, sizeof *context);
  enum swathe_status status;

  if (!options) options = &defaults;
  if (!context) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a context", sizeof *context);
  if (options->threads < 0) {
    free(context);
    return sw_fail(SWATHE_BAD_USE, "%d threads: 0 for all processors, or a positive number",
                   options->threads);
  }
  pthread_mutex_init(&context->mutex, NULL);
  pthread_cond_init(&context->loaded, NULL);
  warn_unknown_variables();
  context->mode = options->mode;
  context->threads = options->threads ? options->threads : sw_device_cpu_processors();
  read_processor(context->processor, sizeof context->processor);
  context->generator = copy_text(setting(options->generator, "SWATHE_GENERATOR_DIR"));
  context->arch = copy_text(setting(options->arch, "SWATHE_ARCH"));
  context->device = options->device;

  status = sw_gen_open(context->generator, &context->gen);
  if (!status) status = choose_isa(context, setting(options->isa, "SWATHE_ISA"));
  if (!status) status = sw_jit_open(options->cache, options->compiler, &context->jit);
  if (!status) {
    context->database = database_path(context, options->database);
    if (!context->database) status = sw_fail(SWATHE_NO_MEMORY, "no memory for a path");
  }
  if (status) {
    swathe_close(context);
    return status;
  }
  sw_context_reopen_database(context);
  if (context->db_failed && context->mode == SWATHE_REPLAY)
    sw_warn("%s; going on without tuned data", context->db_words);
  *context_out = context;
  return SWATHE_OK;
}

void swathe_close(struct swathe_context *context)
{
  if (!context) return;
  while (context->kernels) {
    struct sw_kernel *kernel = context->kernels;
    context->kernels = kernel->next;
    if (kernel->module) sw_context_drop_module(kernel);
    if (kernel->image) sw_jit_unload(kernel->image);
    free(kernel->key);
    free(kernel->words);
    free(kernel);
  }
  sw_context_drop_devices(context);
  if (context->db) sw_db_close(context->db);
  if (context->jit) sw_jit_close(context->jit);
  if (context->gen) sw_gen_close(context->gen);
  pthread_cond_destroy(&context->loaded);
  pthread_mutex_destroy(&context->mutex);
  free(context->database);
  free(context->generator);
  free(context->arch);
  free(context);
}

const char *swathe_database_path(const struct swathe_context *context) { return context->database; }

void swathe_free(void *text) { free(text); }

void sw_context_environment(const struct swathe_context *context, const struct sw_aim *aim,
                            struct sw_db_environment *environment)
{
  *environment = (struct sw_db_environment){
    .isa = aim->isa,
    .processor = context->processor,
    .threads = context->threads,
    .generator = sw_gen_digest(context->gen),
  };
  if (!aim->cuda) return;
  environment->processor = aim->device        ? sw_device_cuda_name(aim->device)
                           : context->apart.on ? context->apart.device
                                               : "unknown";
  environment->threads = 1;
}

enum swathe_status sw_context_aim(struct swathe_context *context,
                                  const struct swathe_problem *problem, const char *isa,
                                  struct sw_aim *aim)
{
  const enum swathe_status status = swathe_problem_check(problem);

  *aim = (struct sw_aim){ .cuda = problem->target == SWATHE_CUDA };
  if (status) return status;
  if (aim->cuda) return sw_context_aim_cuda(context, isa, aim);
  snprintf(aim->isa, sizeof aim->isa, "%s", isa ? isa : context->isa);
  aim->own = !strcmp(aim->isa, context->isa);
  return SWATHE_OK;
}

// ---- Sources ------------------------------------------------------------------------------------

enum swathe_status sw_context_source(struct swathe_context *context,
                                     const struct swathe_problem *problem, const char *kernel,
                                     const char *isa, const char *config,
                                     struct sw_gen_source *source)
{
  const struct sw_gen_request request = { .problem = problem, .kernel = kernel, .isa = isa };
  pthread_mutex_lock(&context->mutex);
  const enum swathe_status status = sw_gen_emit(context->gen, &request, config, source);
  pthread_mutex_unlock(&context->mutex);
  return status ? sw_within(status, "while emitting %s for %s", kernel, isa) : SWATHE_OK;
}

enum sw_jit_compiler sw_context_compiler(const struct sw_aim *aim)
{
  return aim->cuda ? SW_JIT_NVRTC : SW_JIT_CC;
}

enum swathe_status sw_context_compile_failed(const struct sw_gen_source *source,
                                             enum swathe_status status, char *log)
{
  if (!log) return status;
  char *mapped = *log ? sw_gen_map_log(source, log) : NULL;
  if (*log) sw_within(status, "%.*s", 1500, mapped ? mapped : log);
  free(mapped);
  free(log);
  return status;
}

enum swathe_status sw_context_config(struct swathe_context *context,
                                     const struct swathe_problem *problem,
                                     enum swathe_direction direction, const struct sw_aim *aim,
                                     const char *config, char *settled)
{
  struct sw_choice choice;
  const struct sw_gen_request request = { .problem = problem,
                                          .kernel = sw_context_kernel_name(direction),
                                          .isa = aim->isa };
  enum swathe_status status;

  if (!config && aim->own) {
    status = sw_choose(context, problem, direction, aim, &choice);
    if (!status) snprintf(settled, SW_CONFIG_TEXT, "%s", choice.config);
    return status;
  }
  pthread_mutex_lock(&context->mutex);
  if (config) status = sw_gen_check(context->gen, &request, config, settled);
  else status = sw_gen_default(context->gen, &request, settled);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

enum swathe_status swathe_emit(struct swathe_context *context, const struct swathe_problem *problem,
                               enum swathe_direction direction, const char *isa, const char *config,
                               char **text)
{
  char settled[SW_CONFIG_TEXT];
  struct sw_gen_source source = { .text = NULL };
  struct sw_aim aim;
  enum swathe_status status = sw_context_aim(context, problem, isa, &aim);

  if (!status) status = sw_context_config(context, problem, direction, &aim, config, settled);
  if (!status)
    status = sw_context_source(context, problem, sw_context_kernel_name(direction), aim.isa,
                               settled, &source);
  if (status) return status;
  *text = source.text;
  source.text = NULL;
  sw_gen_source_free(&source);
  return SWATHE_OK;
}

// ---- Kernels ------------------------------------------------------------------------------------

static enum swathe_status find_symbols(struct sw_kernel *kernel, const char *name)
{
  char text[64];
  void *address = NULL;
  enum swathe_status status = sw_jit_symbol(kernel->image, name, &address);

  if (status) return status;
  *(void **)&kernel->attention = address;
  snprintf(text, sizeof text, "%s_workspace", name);
  status = sw_jit_symbol(kernel->image, text, &address);
  if (status) return status;
  *(void **)&kernel->workspace = address;
  snprintf(text, sizeof text, "%s_tile_tokens", name);
  status = sw_jit_symbol(kernel->image, text, &address);
  if (status) return status;
  kernel->tile_tokens = *(const sw_int64 *)address;
  if (strcmp(name, "backward")) return SWATHE_OK;
  status = sw_jit_symbol(kernel->image, "gather", &address);
  if (status) return status;
  *(void **)&kernel->gather = address;
  status = sw_jit_symbol(kernel->image, "backward_final_keys", &address);
  if (!status) kernel->final_keys = *(const sw_int64 *)address;
  return status;
}

// Emits, and loads what the cache has or the compiler makes.
static enum swathe_status build_kernel(struct swathe_context *context,
                                       const struct sw_kernel_wanted *wanted,
                                       struct sw_kernel *kernel)
{
  struct sw_gen_source source = { .text = NULL };
  char *log = NULL;
  enum swathe_status status = sw_context_source(context, wanted->problem, wanted->name,
                                                wanted->aim->isa, wanted->config, &source);

  if (status) return status;
  const struct sw_jit_request request = { .name = wanted->name,
                                          .source = source.text,
                                          .flags = source.flags,
                                          .isa = wanted->aim->isa,
                                          .compiler = sw_context_compiler(wanted->aim) };
  status = sw_jit_load(context->jit, &request, sw_compile_deadline_s, &kernel->image,
                       &kernel->report, &log);
  if (status) status = sw_context_compile_failed(&source, status, log);
  sw_gen_source_free(&source);
  return status ? sw_within(status, "while loading %s with %s", wanted->name, wanted->config)
                : SWATHE_OK;
}

// A kernel's origin decides its source, so that a warm start need not emit it.  The texts of a
// directory change under way: with one, the source is always made.
static enum swathe_status load_kernel(struct swathe_context *context,
                                      const struct sw_kernel_wanted *wanted,
                                      struct sw_kernel *kernel)
{
  const enum sw_jit_compiler compiler = sw_context_compiler(wanted->aim);
  const char *digest = sw_gen_digest(context->gen);
  char text[SW_PROBLEM_TEXT], origin[SW_PROBLEM_TEXT + SW_CONFIG_TEXT + 256];
  enum swathe_status status = SWATHE_NOT_FOUND;

  swathe_problem_format(wanted->problem, text, sizeof text);
  snprintf(origin, sizeof origin, "%s %s %s %s %s", digest, wanted->name, wanted->aim->isa,
           wanted->config, text);
  if (!context->generator)
    status = sw_jit_recall(context->jit, compiler, origin, wanted->name, &kernel->image,
                           &kernel->report);
  if (status) {
    status = build_kernel(context, wanted, kernel);
    if (status) return status;
    if (!context->generator) sw_jit_remember(context->jit, compiler, origin, kernel->report.key);
  }
  if (wanted->aim->cuda) status = sw_context_load_module(wanted->aim->device, wanted->name, kernel);
  else status = find_symbols(kernel, wanted->name);
  return status ? sw_within(status, "in the image of %s", wanted->name) : SWATHE_OK;
}

// The key's entry, new or old; *loading: the caller is the one to load it.  With the mutex held.
static struct sw_kernel *find_or_add(struct swathe_context *context, const char *key, bool *loading)
{
  struct sw_kernel *kernel;

  for (kernel = context->kernels; kernel; kernel = kernel->next)
    if (!strcmp(kernel->key, key)) break;
  *loading = !kernel || kernel->state == SW_KERNEL_FAILED;
  if (kernel) {
    if (*loading) kernel->state = SW_KERNEL_LOADING;
    return kernel;
  }
  kernel = calloc(1, sizeof *kernel);
  if (kernel) kernel->key = strdup(key);
  if (!kernel || !kernel->key) {
    free(kernel);
    return NULL;
  }
  kernel->next = context->kernels;
  context->kernels = kernel;
  return kernel;
}

// Sets what came of a load.  With the mutex held.
static void settle_kernel(struct swathe_context *context, struct sw_kernel *kernel,
                          enum swathe_status status)
{
  kernel->status = status;
  kernel->state = status ? SW_KERNEL_FAILED : SW_KERNEL_READY;
  free(kernel->words);
  kernel->words = status ? strdup(swathe_error()) : NULL;
  if (!status) context->loaded_count += kernel->report.cached;
  if (!status) context->compiled_count += !kernel->report.cached;
  pthread_cond_broadcast(&context->loaded);
}

// The problem a kernel is made for: what is told at a launch, or guides tuning alone, is set to one
// value, so that layers that differ in nothing else share the loaded kernel.
static struct swathe_problem kernel_problem(const struct swathe_problem *problem)
{
  struct swathe_problem made_for = *problem;
  made_for.q_heads = problem->q_heads / problem->kv_heads;
  made_for.kv_heads = 1;
  made_for.scale = 0;
  made_for.softcap = problem->softcap > 0;
  made_for.halo_gradient = SWATHE_F32;
  made_for.layout = SWATHE_CONTIGUOUS;
  made_for.ranks = 1;
  made_for.tokens_per_rank = 1;
  return made_for;
}

enum swathe_status sw_context_kernel(struct swathe_context *context,
                                     const struct sw_kernel_wanted *wanted,
                                     const struct sw_kernel **kernel_out)
{
  char text[SW_PROBLEM_TEXT], key[SW_PROBLEM_TEXT + SW_CONFIG_TEXT + 64];
  bool loading = false;

  const struct swathe_problem made_for = kernel_problem(wanted->problem);
  struct sw_kernel_wanted exactly = *wanted;

  exactly.problem = &made_for;
  swathe_problem_format(&made_for, text, sizeof text);
  snprintf(key, sizeof key, "%s %s %d %s %s", wanted->name, wanted->aim->isa,
           wanted->aim->device ? sw_device_cuda_ordinal(wanted->aim->device) : -1, wanted->config,
           text);
  pthread_mutex_lock(&context->mutex);
  struct sw_kernel *kernel = find_or_add(context, key, &loading);
  if (loading && kernel) {
    pthread_mutex_unlock(&context->mutex);
    const enum swathe_status loaded = load_kernel(context, &exactly, kernel);
    pthread_mutex_lock(&context->mutex);
    settle_kernel(context, kernel, loaded);
  }
  while (kernel && kernel->state == SW_KERNEL_LOADING)
    pthread_cond_wait(&context->loaded, &context->mutex);
  enum swathe_status status = kernel ? kernel->status : SWATHE_NO_MEMORY;
  if (status)
    sw_fail(status, "%s", kernel && kernel->words ? kernel->words : "no memory for a kernel");
  pthread_mutex_unlock(&context->mutex);
  if (!status) *kernel_out = kernel;
  return status;
}

void swathe_kernel_counts(struct swathe_context *context, int64_t *compiled, int64_t *loaded)
{
  pthread_mutex_lock(&context->mutex);
  *compiled = context->compiled_count;
  *loaded = context->loaded_count;
  pthread_mutex_unlock(&context->mutex);
}

// ---- Presets and spaces -------------------------------------------------------------------------

enum swathe_status swathe_models(struct swathe_context *context, swathe_model_visit *visit,
                                 void *arg)
{
  pthread_mutex_lock(&context->mutex);
  const enum swathe_status status = sw_gen_models(context->gen, visit, arg);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

struct model_search {
  const char *name;
  struct swathe_problem problem;
  char near[512];
  bool found;
};

// Near: the names share their family's first letters.
static void match_model(void *arg, const struct swathe_model *model)
{
  struct model_search *search = arg;

  if (!strcmp(model->name, search->name)) {
    search->problem = model->problem;
    search->found = true;
  }
  if (strncasecmp(model->name, search->name, 3)) return;
  const size_t used = strlen(search->near);
  snprintf(search->near + used, sizeof search->near - used, "%s%s", used ? ", " : "", model->name);
}

enum swathe_status swathe_model_problem(struct swathe_context *context, const char *name,
                                        struct swathe_problem *problem)
{
  struct model_search search = { .name = name };
  const enum swathe_status status = swathe_models(context, match_model, &search);

  if (status) return status;
  if (!search.found && *search.near)
    return sw_fail(SWATHE_NOT_FOUND, "no preset is called '%s'; near it: %s", name, search.near);
  if (!search.found)
    return sw_fail(SWATHE_NOT_FOUND, "no preset is called '%s'; 'swathe models' lists them", name);
  *problem = search.problem;
  return SWATHE_OK;
}

enum swathe_status swathe_configs(struct swathe_context *context,
                                  const struct swathe_problem *problem,
                                  enum swathe_direction direction, const char *isa,
                                  bool exhaustive, swathe_config_visit *visit,
                                  swathe_refused_visit *refused, void *arg)
{
  char config[SW_CONFIG_TEXT];
  struct sw_gen_walk *walk = NULL;
  struct sw_aim aim;
  enum swathe_status status = sw_context_aim(context, problem, isa, &aim);

  if (status) return status;
  const struct sw_gen_request request = { .problem = problem,
                                          .kernel = sw_context_kernel_name(direction),
                                          .isa = aim.isa };
  pthread_mutex_lock(&context->mutex);
  status = sw_gen_walk_begin(context->gen, &request, exhaustive, &walk);
  while (!status) {
    status = sw_gen_walk_next(walk, config);
    if (!status && !visit(arg, config)) break;
  }
  if (status == SWATHE_NOT_FOUND) status = SWATHE_OK;
  if (!status && refused) sw_gen_walk_refused(walk, refused, arg);
  if (walk) sw_gen_walk_end(walk);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

// ---- Database -----------------------------------------------------------------------------------

// The verbs that show the database need it; the words say what is wrong with it.
static enum swathe_status need_database(struct swathe_context *context)
{
  if (context->db_failed) return sw_fail(SWATHE_DATABASE, "%s", context->db_words);
  if (!context->db)
    return sw_fail(SWATHE_NOT_FOUND,
                   "there is no place for a tuning database: give one, or set SWATHE_DB");
  return SWATHE_OK;
}

enum swathe_status swathe_db_list(struct swathe_context *context, swathe_pick_visit *visit,
                                  void *arg)
{
  enum swathe_status status = need_database(context);
  if (status) return status;
  pthread_mutex_lock(&context->mutex);
  status = sw_db_list(context->db, visit, arg);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

enum swathe_status swathe_db_show(struct swathe_context *context,
                                  const struct swathe_problem *problem, swathe_sample_visit *visit,
                                  void *arg)
{
  enum swathe_status status = need_database(context);
  if (!status) status = swathe_problem_check(problem);
  if (status) return status;
  pthread_mutex_lock(&context->mutex);
  status = sw_db_samples(context->db, problem, visit, arg);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

enum swathe_status swathe_db_samples(struct swathe_context *context, swathe_sample_visit *visit,
                                     void *arg)
{
  enum swathe_status status = need_database(context);
  if (status) return status;
  pthread_mutex_lock(&context->mutex);
  status = sw_db_samples(context->db, NULL, visit, arg);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

enum swathe_status swathe_db_best(struct swathe_context *context,
                                  const struct swathe_problem *problem,
                                  enum swathe_direction direction, char *config, size_t config_size,
                                  char *why, size_t why_size)
{
  struct sw_choice choice;
  struct sw_aim aim;
  enum swathe_status status = sw_context_aim(context, problem, NULL, &aim);

  if (!status) status = sw_choose(context, problem, direction, &aim, &choice);
  if (status) return status;
  snprintf(config, config_size, "%s", choice.config);
  snprintf(why, why_size, "%s", choice.why);
  return SWATHE_OK;
}
