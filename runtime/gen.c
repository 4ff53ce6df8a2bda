// gen.c: the generator as C sees it: one Lua state in a box.  It turns problems into tables,
// calls the entry points of generator/emit.lua and turns what comes back into text and statuses.
//
// The box: text chunks only, no io, os, package or debug; memory is capped and so is the number
// of instructions one call may take.  Everything that touches Lua runs in protected mode, because
// any push may run out of memory.
#include "gen.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

enum {
  MEMORY_BYTES = 64 << 20,
  FILE_BYTES = 1 << 20,        // of one file of a generator directory
  STEP = 1 << 20,              // Lua instructions between two looks at the count
  STEPS_PER_CALL = 256,        // a second or some
};

// Every generator/*.lua and everything in templates/, as scripts/embed.cmake lays them out; ends
// with zeros.
struct sw_embedded { const char *name; const char *text; size_t size; };
extern const struct sw_embedded sw_generator_texts[];
extern const char sw_generator_texts_digest[];

struct sw_gen {
  lua_State *lua;
  char *directory;             // or NULL: the built-in texts
  size_t used_bytes;
  bool hit_cap;                // memory was refused because of the cap
  int steps;                   // taken by the call that runs
  int entry;                   // registry reference of what emit.lua returns
  char digest[80];             // of all texts
};

// ---- The box -----------------------------------------------------------------------------------

static void *allocate(void *arg, void *block, size_t old_bytes, size_t new_bytes)
{
  struct sw_gen *gen = arg;
  if (!block) old_bytes = 0;   // else Lua tells the kind of object here
  if (new_bytes == 0) {
    gen->used_bytes -= old_bytes;
    free(block);
    return NULL;
  }
  if (new_bytes > old_bytes && gen->used_bytes - old_bytes + new_bytes > MEMORY_BYTES) {
    gen->hit_cap = true;
    return NULL;
  }
  void *moved = realloc(block, new_bytes);
  if (moved) gen->used_bytes = gen->used_bytes - old_bytes + new_bytes;
  return moved;
}

static struct sw_gen *gen_of(lua_State *lua)
{
  struct sw_gen *gen;
  memcpy(&gen, lua_getextraspace(lua), sizeof gen);
  return gen;
}

// Level 0 is the Lua function that was interrupted; luaL_error would name its caller.
static void count_steps(lua_State *lua, lua_Debug *record)
{
  if (++gen_of(lua)->steps <= STEPS_PER_CALL) return;
  lua_getinfo(lua, "Sl", record);
  lua_pushfstring(lua, "%s:%d: the generator ran for more than %d million instructions",
                  record->short_src, record->currentline, STEPS_PER_CALL);
  lua_error(lua);
}

// A plain relative path of letters, digits, '_', '.' and '/'.
static bool sound_name(const char *name)
{
  const char *const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./";
  return *name && *name != '/' && !strstr(name, "..") && !name[strspn(name, allowed)];
}

// Pushes the text of a file below the generator directory.
static void push_file(lua_State *lua, const char *directory, const char *name)
{
  char *text = lua_newuserdatauv(lua, FILE_BYTES, 0);
  const char *path = lua_pushfstring(lua, "%s/%s", directory, name);
  FILE *file = fopen(path, "rb");
  if (!file) luaL_error(lua, "%s cannot be opened: %s", path, strerror(errno));
  const size_t bytes = fread(text, 1, FILE_BYTES, file);
  const bool failed = ferror(file) != 0;
  fclose(file);
  if (failed) luaL_error(lua, "%s cannot be read", path);
  if (bytes == FILE_BYTES) luaL_error(lua, "%s is larger than %d bytes", path, FILE_BYTES - 1);
  lua_pushlstring(lua, text, bytes);
}

static void push_embedded(lua_State *lua, const char *name)
{
  const struct sw_embedded *file = sw_generator_texts;
  while (file->name && strcmp(file->name, name)) file++;
  if (!file->name) luaL_error(lua, "there is no %s", name);
  lua_pushlstring(lua, file->text, file->size);
}

static void push_text(lua_State *lua, const char *name)
{
  const struct sw_gen *gen = gen_of(lua);
  if (!sound_name(name)) luaL_error(lua, "'%s' is no file of the generator", name);
  if (gen->directory) push_file(lua, gen->directory, name);
  else push_embedded(lua, name);
}

// read_text(name): the text of a file of the generator, "templates/cpu/forward.c".
static int read_text(lua_State *lua)
{
  push_text(lua, luaL_checkstring(lua, 1));
  return 1;
}

// Pushes the function that `text` compiles to.  Text only: bytecode could break out of the box.
static void push_chunk(lua_State *lua, const char *text, size_t bytes, const char *name)
{
  if (luaL_loadbufferx(lua, text, bytes, name, "t") != LUA_OK) lua_error(lua);
}

// load_text(text, name, names): the function that `text` compiles to, with `names` as its globals.
static int load_text(lua_State *lua)
{
  size_t bytes;
  const char *text = luaL_checklstring(lua, 1, &bytes);
  push_chunk(lua, text, bytes, luaL_checkstring(lua, 2));
  lua_pushvalue(lua, 3);
  if (!lua_setupvalue(lua, -2, 1)) lua_pop(lua, 1);
  return 1;
}

// require(name): what generator/<name>.lua returns; run once.  Upvalue 1: what was returned, by
// name.
static int require_module(lua_State *lua)
{
  const char *name = luaL_checkstring(lua, 1);
  size_t bytes;
  if (lua_getfield(lua, lua_upvalueindex(1), name) != LUA_TNIL) return 1;

  const char *path = lua_pushfstring(lua, "generator/%s.lua", name);
  push_text(lua, path);
  const char *text = lua_tolstring(lua, -1, &bytes);
  push_chunk(lua, text, bytes, lua_pushfstring(lua, "@%s", path));
  lua_call(lua, 0, 1);
  if (lua_isnil(lua, -1)) luaL_error(lua, "%s returns nothing", path);
  lua_pushvalue(lua, -1);
  lua_setfield(lua, lua_upvalueindex(1), name);
  return 1;
}

static void remove_fields(lua_State *lua, const char *table, const char *const *names)
{
  lua_getglobal(lua, table);
  for (; *names; names++) {
    lua_pushnil(lua);
    lua_setfield(lua, -2, *names);
  }
  lua_pop(lua, 1);
}

static void open_box(lua_State *lua)
{
  static const luaL_Reg libraries[] = {
    { LUA_GNAME, luaopen_base },       { LUA_STRLIBNAME, luaopen_string },
    { LUA_TABLIBNAME, luaopen_table }, { LUA_MATHLIBNAME, luaopen_math },
    { LUA_COLIBNAME, luaopen_coroutine },
  };
  static const char *const no_base[] = { "dofile", "loadfile", "load", "print", "warn",
                                         "collectgarbage", NULL };
  static const char *const no_string[] = { "dump", NULL };
  static const char *const no_math[] = { "random", "randomseed", NULL };

  for (size_t i = 0; i < sizeof libraries / sizeof libraries[0]; i++) {
    luaL_requiref(lua, libraries[i].name, libraries[i].func, 1);
    lua_pop(lua, 1);
  }
  remove_fields(lua, LUA_GNAME, no_base);
  remove_fields(lua, LUA_STRLIBNAME, no_string);
  remove_fields(lua, LUA_MATHLIBNAME, no_math);
  lua_register(lua, "read_text", read_text);
  lua_register(lua, "load_text", load_text);
  lua_newtable(lua);
  lua_pushcclosure(lua, require_module, 1);
  lua_setglobal(lua, "require");
}

// ---- Questions ---------------------------------------------------------------------------------

// One call into the box: what goes in and where the answer goes.  Each question uses what it needs.
struct question {
  struct sw_gen *gen;
  const char *entry;                      // of emit.lua
  const struct sw_gen_request *request;   // or NULL
  const char *text;                       // or NULL
  bool exhaustive;
  char *config;                           // SW_CONFIG_TEXT bytes
  struct sw_gen_source *source;
  struct sw_gen_walk *walk;
  swathe_model_visit *visit_model;
  swathe_refused_visit *visit_refused;
  sw_gen_isa_visit *visit_isa;
  sw_gen_size_visit *visit_size;
  void *arg;
};

struct sw_gen_walk {
  struct sw_gen *gen;
  int next, refused;                      // registry references of the functions space.walk returns
};

// Runs `body` with the question in protected mode; it returns one integer, a status whose words
// are set.
static enum swathe_status ask(struct question *question, lua_CFunction body)
{
  struct sw_gen *gen = question->gen;
  lua_State *lua = gen->lua;
  const int top = lua_gettop(lua);
  enum swathe_status status;

  gen->steps = 0;
  gen->hit_cap = false;
  lua_pushcfunction(lua, body);
  lua_pushlightuserdata(lua, question);
  const int error = lua_pcall(lua, 1, 1, 0);
  if (error == LUA_OK)
    status = (enum swathe_status)lua_tointeger(lua, -1);
  else if (error == LUA_ERRMEM && !gen->hit_cap)
    status = sw_fail(SWATHE_NO_MEMORY, "out of memory in the generator");
  else if (error == LUA_ERRMEM)
    status = sw_fail(SWATHE_EMIT, "the generator needs more than %d MiB", MEMORY_BYTES >> 20);
  else
    status = sw_fail(SWATHE_EMIT, "%s", lua_isstring(lua, -1) ? lua_tostring(lua, -1) : "unknown");
  lua_settop(lua, top);
  return status;
}

static struct question *question_of(lua_State *lua)
{
  return lua_touserdata(lua, 1);
}

static int answer(lua_State *lua, enum swathe_status status)
{
  lua_pushinteger(lua, status);
  return 1;
}

// The answer nil, words, status name, at index `at`, as a failure.
static int answer_refusal(lua_State *lua, int at)
{
#define STATUS_ROW(name, text) { #name, SWATHE_##name },
  static const struct { const char *name; enum swathe_status status; } rows[] = {
    SWATHE_STATUS_MAP(STATUS_ROW)
  };
#undef STATUS_ROW
  const char *words = luaL_checkstring(lua, at + 1), *name = luaL_checkstring(lua, at + 2);
  for (size_t i = 1; i < sizeof rows / sizeof rows[0]; i++)
    if (!strcmp(rows[i].name, name)) return answer(lua, sw_fail(rows[i].status, "%s", words));
  return luaL_error(lua, "'%s' is no status; with it came: %s", name, words);
}

static void set_integer(lua_State *lua, const char *name, lua_Integer value)
{
  lua_pushinteger(lua, value);
  lua_setfield(lua, -2, name);
}

static void set_string(lua_State *lua, const char *name, const char *value)
{
  lua_pushstring(lua, value);
  lua_setfield(lua, -2, name);
}

// Pushes { kernel =, isa =, problem = {...} }, a field for each field of the problem.
static void push_request(lua_State *lua, const struct sw_gen_request *request)
{
  const struct swathe_problem *problem = request->problem;
  lua_createtable(lua, 0, 3);
  set_string(lua, "kernel", request->kernel);
  set_string(lua, "isa", request->isa);

  lua_createtable(lua, 0, 14);
  set_integer(lua, "q_heads", problem->q_heads);
  set_integer(lua, "kv_heads", problem->kv_heads);
  set_integer(lua, "head_dim_qk", problem->head_dim_qk);
  set_integer(lua, "head_dim_v", problem->head_dim_v);
  set_integer(lua, "window_left", problem->window_left);    // SWATHE_UNLIMITED is math.maxinteger
  set_integer(lua, "window_right", problem->window_right);
  set_string(lua, "dtype", swathe_dtype_name(problem->dtype));
  set_string(lua, "target", swathe_target_name(problem->target));
  set_string(lua, "layout", swathe_layout_name(problem->layout));
  set_integer(lua, "ranks", problem->ranks);
  set_integer(lua, "tokens_per_rank", problem->tokens_per_rank);
  lua_pushboolean(lua, problem->sinks);
  lua_setfield(lua, -2, "sinks");
  lua_pushnumber(lua, problem->softcap);
  lua_setfield(lua, -2, "softcap");
  lua_pushnumber(lua, problem->scale);
  lua_setfield(lua, -2, "scale");
  lua_setfield(lua, -2, "problem");
}

// Calls the question's entry with its request and text; leaves `results` results on the stack.
static void call_entry(lua_State *lua, const struct question *question, int results)
{
  int count = 0;
  lua_rawgeti(lua, LUA_REGISTRYINDEX, question->gen->entry);
  lua_getfield(lua, -1, question->entry);
  lua_remove(lua, -2);
  if (question->request) push_request(lua, question->request), count++;
  if (question->text) lua_pushstring(lua, question->text), count++;
  lua_call(lua, count, results);
}

// Copies the config on top of the stack to where the question wants it.
static int answer_config(lua_State *lua, const struct question *question)
{
  size_t length;
  const char *config = luaL_checklstring(lua, -1, &length);
  if (length >= SW_CONFIG_TEXT)
    return luaL_error(lua, "the config is longer than %d bytes: %s", SW_CONFIG_TEXT - 1, config);
  memcpy(question->config, config, length + 1);
  return answer(lua, SWATHE_OK);
}

static int ask_config(lua_State *lua)
{
  const struct question *question = question_of(lua);
  call_entry(lua, question, 3);
  if (lua_isnil(lua, 2)) return answer_refusal(lua, 2);
  lua_settop(lua, 2);
  return answer_config(lua, question);
}

static char *duplicate(const char *text, size_t length)
{
  char *copy = malloc(length + 1);
  if (copy) memcpy(copy, text, length + 1);
  return copy;
}

static int ask_source(lua_State *lua)
{
  const struct question *question = question_of(lua);
  struct sw_gen_source *source = question->source;
  size_t text, flags, origins;

  call_entry(lua, question, 3);
  if (lua_isnil(lua, 2)) return answer_refusal(lua, 2);
  const char *const texts[] = { luaL_checklstring(lua, 2, &text), luaL_checklstring(lua, 3, &flags),
                                luaL_checklstring(lua, 4, &origins) };
  source->text = duplicate(texts[0], text);
  source->flags = duplicate(texts[1], flags);
  source->origins = duplicate(texts[2], origins);
  if (source->text && source->flags && source->origins) return answer(lua, SWATHE_OK);
  sw_gen_source_free(source);
  return answer(lua, sw_fail(SWATHE_NO_MEMORY, "no memory for emitted source"));
}

static int ask_walk(lua_State *lua)
{
  const struct question *question = question_of(lua);
  lua_rawgeti(lua, LUA_REGISTRYINDEX, question->gen->entry);
  lua_getfield(lua, -1, question->entry);
  push_request(lua, question->request);
  lua_pushboolean(lua, question->exhaustive);
  lua_call(lua, 2, 3);
  if (lua_isnil(lua, 3)) return answer_refusal(lua, 3);
  lua_settop(lua, 4);
  question->walk->refused = luaL_ref(lua, LUA_REGISTRYINDEX);
  question->walk->next = luaL_ref(lua, LUA_REGISTRYINDEX);
  return answer(lua, SWATHE_OK);
}

static int ask_next(lua_State *lua)
{
  const struct question *question = question_of(lua);
  lua_rawgeti(lua, LUA_REGISTRYINDEX, question->walk->next);
  lua_call(lua, 0, 1);
  return lua_isnil(lua, -1) ? answer(lua, SWATHE_NOT_FOUND) : answer_config(lua, question);
}

static int ask_refused(lua_State *lua)
{
  const struct question *question = question_of(lua);
  lua_rawgeti(lua, LUA_REGISTRYINDEX, question->walk->refused);
  lua_call(lua, 0, 1);
  for (lua_Integer i = 1; lua_geti(lua, 2, i) != LUA_TNIL; i++, lua_settop(lua, 2)) {
    lua_getfield(lua, 3, "rule");
    lua_getfield(lua, 3, "points");
    question->visit_refused(question->arg, luaL_checkstring(lua, 4), luaL_checkinteger(lua, 5));
  }
  return answer(lua, SWATHE_OK);
}

static int ask_sizes(lua_State *lua)
{
  const struct question *question = question_of(lua);
  call_entry(lua, question, 3);
  if (lua_isnil(lua, 2)) return answer_refusal(lua, 2);
  lua_settop(lua, 2);
  for (lua_Integer i = 1; lua_geti(lua, 2, i) != LUA_TNIL; i++, lua_settop(lua, 2)) {
    lua_getfield(lua, 3, "name");
    lua_getfield(lua, 3, "value");
    question->visit_size(question->arg, luaL_checkstring(lua, 4), luaL_checkinteger(lua, 5));
  }
  return answer(lua, SWATHE_OK);
}

static int ask_isas(lua_State *lua)
{
  const struct question *question = question_of(lua);
  call_entry(lua, question, 1);
  for (lua_Integer i = 1; lua_geti(lua, 2, i) != LUA_TNIL; i++, lua_settop(lua, 2)) {
    lua_getfield(lua, 3, "name");
    lua_getfield(lua, 3, "flags");
    question->visit_isa(question->arg, luaL_checkstring(lua, 4), luaL_checkstring(lua, 5));
  }
  return answer(lua, SWATHE_OK);
}

// ---- Models ------------------------------------------------------------------------------------

// Fields of the preset at index 3, by its name in models.lua.
static lua_Integer whole_field(lua_State *lua, const char *name)
{
  int is_whole;
  lua_getfield(lua, 3, name);
  const lua_Integer value = lua_tointegerx(lua, -1, &is_whole);
  if (!is_whole) luaL_error(lua, "models.lua: '%s' of a preset is not a whole number", name);
  lua_pop(lua, 1);
  return value;
}

static double number_field(lua_State *lua, const char *name)
{
  int is_number;
  lua_getfield(lua, 3, name);
  const double value = lua_tonumberx(lua, -1, &is_number);
  if (!is_number) luaL_error(lua, "models.lua: '%s' of a preset is not a number", name);
  lua_pop(lua, 1);
  return value;
}

// Stays on the stack, so that it lives until the preset is done with.
static const char *text_field(lua_State *lua, const char *name)
{
  lua_getfield(lua, 3, name);
  if (lua_type(lua, -1) != LUA_TSTRING) luaL_error(lua, "models.lua: a preset lacks '%s'", name);
  return lua_tostring(lua, -1);
}

static void read_model(lua_State *lua, struct swathe_model *model)
{
  struct swathe_problem *problem = &model->problem;
  model->name = text_field(lua, "name");
  model->family = text_field(lua, "family");
  model->source = text_field(lua, "source");
  model->note = text_field(lua, "note");
  model->layers = (int32_t)whole_field(lua, "layers");
  model->swa_layers = (int32_t)whole_field(lua, "swa_layers");

  swathe_problem_init(problem);
  problem->q_heads = (int32_t)whole_field(lua, "q_heads");
  problem->kv_heads = (int32_t)whole_field(lua, "kv_heads");
  problem->head_dim_qk = (int32_t)whole_field(lua, "head_dim_qk");
  problem->head_dim_v = (int32_t)whole_field(lua, "head_dim_v");
  problem->window_left = whole_field(lua, "window_left");
  problem->window_right = whole_field(lua, "window_right");
  problem->softcap = number_field(lua, "softcap");
  problem->scale = number_field(lua, "scale");
  lua_getfield(lua, 3, "sinks");
  problem->sinks = lua_toboolean(lua, -1);
  if (swathe_dtype_parse(text_field(lua, "dtype"), &problem->dtype) ||
      swathe_problem_check(problem))
    luaL_error(lua, "models.lua: %s: %s", model->name, swathe_error());
}

static int ask_models(lua_State *lua)
{
  const struct question *question = question_of(lua);
  call_entry(lua, question, 1);
  for (lua_Integer i = 1; lua_geti(lua, 2, i) != LUA_TNIL; i++, lua_settop(lua, 2)) {
    struct swathe_model model;
    luaL_checkstack(lua, 20, "a preset");
    read_model(lua, &model);
    question->visit_model(question->arg, &model);
  }
  return answer(lua, SWATHE_OK);
}

// ---- The contract ------------------------------------------------------------------------------

static int ask_open(lua_State *lua)
{
  const struct question *question = question_of(lua);
  open_box(lua);
  lua_sethook(lua, count_steps, LUA_MASKCOUNT, STEP);
  lua_getglobal(lua, "require");
  lua_pushstring(lua, question->entry);
  lua_call(lua, 1, 1);
  luaL_checktype(lua, -1, LUA_TTABLE);
  question->gen->entry = luaL_ref(lua, LUA_REGISTRYINDEX);
  return answer(lua, SWATHE_OK);
}

// Files of the same names as the built-in texts; one that is not there counts as never changed.
static void digest_texts(struct sw_gen *gen)
{
  struct timespec newest = { 0, 0 };
  char path[4096];

  if (!gen->directory) {
    snprintf(gen->digest, sizeof gen->digest, "%.16s", sw_generator_texts_digest);
    return;
  }
  for (const struct sw_embedded *file = sw_generator_texts; file->name; file++) {
    struct stat state;
    snprintf(path, sizeof path, "%s/%s", gen->directory, file->name);
    if (stat(path, &state)) continue;
    if (state.st_mtim.tv_sec > newest.tv_sec ||
        (state.st_mtim.tv_sec == newest.tv_sec && state.st_mtim.tv_nsec > newest.tv_nsec))
      newest = state.st_mtim;
  }
  snprintf(gen->digest, sizeof gen->digest, "directory-%lld.%09ld", (long long)newest.tv_sec,
           newest.tv_nsec);
}

const char *sw_gen_digest(const struct sw_gen *gen) { return gen->digest; }

enum swathe_status sw_gen_open(const char *directory, struct sw_gen **gen_out)
{
  struct sw_gen *gen = calloc(1, sizeof *gen);
  if (!gen) return sw_fail(SWATHE_NO_MEMORY, "no memory for the generator");
  if (directory) gen->directory = duplicate(directory, strlen(directory));
  gen->lua = lua_newstate(allocate, gen);
  if (!gen->lua || (directory && !gen->directory)) {
    sw_gen_close(gen);
    return sw_fail(SWATHE_NO_MEMORY, "no memory for the generator");
  }
  memcpy(lua_getextraspace(gen->lua), &gen, sizeof gen);
  digest_texts(gen);

  struct question question = { .gen = gen, .entry = "emit" };
  const enum swathe_status status = ask(&question, ask_open);
  if (status) {
    sw_gen_close(gen);
    return sw_within(status, "while opening the generator%s%s", directory ? " in " : "",
                     directory ? directory : "");
  }
  *gen_out = gen;
  return SWATHE_OK;
}

void sw_gen_close(struct sw_gen *gen)
{
  if (!gen) return;
  if (gen->lua) lua_close(gen->lua);
  assert(!gen->used_bytes);
  free(gen->directory);
  free(gen);
}

enum swathe_status sw_gen_models(struct sw_gen *gen, swathe_model_visit *visit, void *arg)
{
  struct question question = { .gen = gen, .entry = "models", .visit_model = visit, .arg = arg };
  return ask(&question, ask_models);
}

enum swathe_status sw_gen_isas(struct sw_gen *gen, enum swathe_target target,
                               sw_gen_isa_visit *visit, void *arg)
{
  struct question question = { .gen = gen, .entry = "isas", .text = swathe_target_name(target),
                               .visit_isa = visit, .arg = arg };
  return ask(&question, ask_isas);
}

// Asks about a request whose problem is sound, and says in a failure's words what it was about.
static enum swathe_status ask_about(struct question *question, lua_CFunction body)
{
  const struct sw_gen_request *request = question->request;
  assert(request->problem && request->kernel && request->isa);
  enum swathe_status status = swathe_problem_check(request->problem);
  if (!status) status = ask(question, body);
  return status ? sw_within(status, "in kernel %s for %s", request->kernel, request->isa)
                : SWATHE_OK;
}

enum swathe_status sw_gen_default(struct sw_gen *gen, const struct sw_gen_request *request,
                                  char *config)
{
  struct question question = {
    .gen = gen, .entry = "default", .request = request, .config = config
  };
  return ask_about(&question, ask_config);
}

static enum swathe_status check_length(const char *config)
{
  if (strnlen(config, SW_CONFIG_TEXT) < SW_CONFIG_TEXT) return SWATHE_OK;
  return sw_fail(SWATHE_BAD_CONFIG, "the config is longer than %d bytes", SW_CONFIG_TEXT - 1);
}

enum swathe_status sw_gen_check(struct sw_gen *gen, const struct sw_gen_request *request,
                                const char *text, char *config)
{
  struct question question = { .gen = gen, .entry = "check", .request = request, .text = text,
                               .config = config };
  const enum swathe_status status = check_length(text);
  return status ? status : ask_about(&question, ask_config);
}

enum swathe_status sw_gen_sizes(struct sw_gen *gen, const struct sw_gen_request *request,
                                const char *config, sw_gen_size_visit *visit, void *arg)
{
  struct question question = { .gen = gen, .entry = "sizes", .request = request, .text = config,
                               .visit_size = visit, .arg = arg };
  const enum swathe_status status = check_length(config);
  return status ? status : ask_about(&question, ask_sizes);
}

enum swathe_status sw_gen_emit(struct sw_gen *gen, const struct sw_gen_request *request,
                               const char *config, struct sw_gen_source *source)
{
  struct sw_gen_source made = { 0 };
  struct question question = { .gen = gen, .entry = "source", .request = request, .text = config,
                               .source = &made };
  enum swathe_status status = check_length(config);
  if (!status) status = ask_about(&question, ask_source);
  if (!status) *source = made;
  return status;
}

void sw_gen_source_free(struct sw_gen_source *source)
{
  free(source->text);
  free(source->flags);
  free(source->origins);
  *source = (struct sw_gen_source){ 0 };
}

enum swathe_status sw_gen_walk_begin(struct sw_gen *gen, const struct sw_gen_request *request,
                                     bool exhaustive, struct sw_gen_walk **walk_out)
{
  struct sw_gen_walk *walk = malloc(sizeof *walk);
  if (!walk) return sw_fail(SWATHE_NO_MEMORY, "no memory for a walk over the space");
  *walk = (struct sw_gen_walk){ gen, LUA_NOREF, LUA_NOREF };

  struct question question = { .gen = gen, .entry = "walk", .request = request, .walk = walk,
                               .exhaustive = exhaustive };
  const enum swathe_status status = ask_about(&question, ask_walk);
  if (status) {
    sw_gen_walk_end(walk);
    return status;
  }
  *walk_out = walk;
  return SWATHE_OK;
}

enum swathe_status sw_gen_walk_next(struct sw_gen_walk *walk, char *config)
{
  struct question question = { .gen = walk->gen, .walk = walk, .config = config };
  return ask(&question, ask_next);
}

void sw_gen_walk_refused(struct sw_gen_walk *walk, swathe_refused_visit *visit, void *arg)
{
  struct question question = { .gen = walk->gen, .walk = walk, .visit_refused = visit, .arg = arg };
  ask(&question, ask_refused);
}

void sw_gen_walk_end(struct sw_gen_walk *walk)
{
  if (!walk) return;
  luaL_unref(walk->gen->lua, LUA_REGISTRYINDEX, walk->next);
  luaL_unref(walk->gen->lua, LUA_REGISTRYINDEX, walk->refused);
  free(walk);
}

// ---- Compiler messages -------------------------------------------------------------------------

// The "file:line" of emitted line `line` (from 1) and its length; NULL if there is no such line.
static const char *origin_of(const struct sw_gen_source *source, unsigned long line, size_t *length)
{
  const char *origin = source->origins;
  if (line == 0) return NULL;
  for (; line > 1; line--) {
    origin = strchr(origin, '\n');
    if (!origin) return NULL;
    origin++;
  }
  *length = strcspn(origin, "\n");
  return *length ? origin : NULL;
}

// In one line of a log, finds "NAME.c:LINE:" or "NAME.cu(LINE)": `begin` and `end` of what an
// origin replaces.
static bool find_place(const char *text, size_t length, size_t *begin, size_t *end,
                       unsigned long *line)
{
  for (size_t i = 2; i + 2 < length; i++) {
    const bool named =
        !strncmp(text + i - 2, ".c", 2) || (i > 2 && !strncmp(text + i - 3, ".cu", 3));
    if (!named || !strchr(":(", text[i])) continue;
    const size_t digits = strspn(text + i + 1, "0123456789");
    if (digits == 0 || i + 1 + digits >= length) continue;
    if (text[i + 1 + digits] != (text[i] == ':' ? ':' : ')')) continue;
    *line = strtoul(text + i + 1, NULL, 10);
    *begin = i;
    while (*begin > 0 && text[*begin - 1] != ' ') --*begin;
    *end = i + 1 + digits + (text[i] == '(');
    return true;
  }
  return false;
}

static void write_mapped(FILE *out, const struct sw_gen_source *source, const char *text,
                         size_t length)
{
  size_t begin = 0, end = 0, origin_length = 0;
  unsigned long line = 0;
  const char *origin = NULL;
  if (find_place(text, length, &begin, &end, &line))
    origin = origin_of(source, line, &origin_length);
  if (origin) {
    fwrite(text, 1, begin, out);
    fwrite(origin, 1, origin_length, out);
    fwrite(text + end, 1, length - end, out);
  } else {
    fwrite(text, 1, length, out);
  }
}

char *sw_gen_map_log(const struct sw_gen_source *source, const char *log)
{
  char *mapped = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&mapped, &bytes);
  if (!out) return NULL;
  while (*log) {
    const size_t length = strcspn(log, "\n") + (log[strcspn(log, "\n")] == '\n');
    write_mapped(out, source, log, length);
    log += length;
  }
  const bool failed = ferror(out) != 0;
  if (fclose(out) || failed) {
    free(mapped);
    return NULL;
  }
  return mapped;
}
