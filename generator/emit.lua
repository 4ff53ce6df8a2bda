-- emit.lua: the one entry from C.  Kernel, problem, isa and config  ->  source text, compiler
-- flags and where each line came from; and the questions about the space that C asks before that.
--
-- A request is { kernel =, isa =, problem = {...} }.  A question that the caller got wrong
-- answers nil, the reason and a status; whatever is wrong with the generator itself is raised.

local facts = require "facts"
local models = require "models"
local space = require "space"
local spaces = require "spaces"
local targets = require "targets"
local template = require "template"

local emit = {}

local function sorted_names(rows)
  local names = {}
  for name in pairs(rows) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

local function has(list, wanted)
  for _, value in ipairs(list) do
    if value == wanted then return true end
  end
  return false
end

-- Everything a request points at: its declared space, target, isa row and the known names.
local function look_up(request)
  local target_name = request.problem.target
  local target, kernels = targets[target_name], spaces[target_name]
  if not target or not kernels then
    return nil, ("no kernels are written for target %s yet"):format(target_name), "UNSUPPORTED"
  end
  local dtype = request.problem.dtype
  if not has(target.dtypes, dtype) then
    return nil, ("target %s has no kernels for %s; there are %s"):format(
      target_name, dtype, table.concat(target.dtypes, ", ")), "UNSUPPORTED"
  end
  local declared, isa = kernels[request.kernel], target.isas[request.isa]
  if not declared then
    return nil, ("there is no kernel '%s' for target %s; there are %s"):format(
      request.kernel, target_name, sorted_names(kernels)), "BAD_USE"
  end
  if not isa then
    return nil, ("target %s has no isa '%s'; there are %s"):format(
      target_name, request.isa, table.concat(target.order, ", ")), "BAD_USE"
  end

  local known, is_fixed = { isa = request.isa }, {}
  for _, name in ipairs(declared.fixed) do is_fixed[name] = true end
  for _, fact in ipairs(facts.problem) do
    if is_fixed[fact.name] then known[fact.name] = fact.value(request.problem) end
  end
  for _, name in ipairs(declared.fixed) do
    if known[name] == nil then
      error("spaces.lua fixes '" .. name .. "', which facts.lua lacks", 0)
    end
  end
  for name, value in pairs(isa) do
    if name ~= "flags" then known[name] = value end
  end
  return { declared = declared, target = target, target_name = target_name, isa = isa,
           known = known }
end

-- ---- The space ---------------------------------------------------------------------------------

function emit.default(request)
  local found, why, status = look_up(request)
  if not found then return nil, why, status end
  return space.default(found.declared, found.known)
end

function emit.check(request, text)
  local found, why, status = look_up(request)
  if not found then return nil, why, status end
  local config, reason = space.check(found.declared, found.known, text)
  if not config then return nil, reason, "BAD_CONFIG" end
  return config
end

-- The derived sizes of a config: a list of { name =, value = } in declared order; then what the
-- isa has at the most.
function emit.sizes(request, text)
  local found, why, status = look_up(request)
  if not found then return nil, why, status end
  local config, c = space.check(found.declared, found.known, text)
  if not config then return nil, c, "BAD_CONFIG" end
  local list = {}
  for i, size in ipairs(found.declared.derive or {}) do
    list[i] = { name = size[1], value = c[size[1]] }
  end
  for _, name in ipairs { "most_shared_bytes", "most_registers" } do
    list[#list + 1] = found.isa[name] and { name = name, value = found.isa[name] }
  end
  return list
end

-- Returns next() and refused() of space.walk.
function emit.walk(request, exhaustive)
  local found, why, status = look_up(request)
  if not found then return nil, why, status end
  return space.walk(found.declared, found.known, exhaustive)
end

-- Best first: a list of { name =, flags = }.
function emit.isas(target_name)
  local target, list = targets[target_name], {}
  for i, name in ipairs(target and target.order or {}) do
    list[i] = { name = name, flags = table.concat(target.isas[name].flags, " ") }
  end
  return list
end

function emit.models()
  return models
end

-- ---- The source --------------------------------------------------------------------------------

-- The constants of a kernel, in the order they are emitted: { name =, value =, note = }.
local function constants(found, c)
  local list = {}
  local function add(name, note)
    list[#list + 1] = { name = name:upper(), value = c[name], note = note }
  end

  for _, fact in ipairs(facts.problem) do
    if found.known[fact.name] ~= nil then add(fact.name, "problem, " .. fact.note) end
  end
  for _, fact in ipairs(facts.isa) do
    if found.known[fact.name] ~= nil then add(fact.name, "isa, " .. fact.note) end
  end
  for _, knob in ipairs(found.declared.tune) do add(knob[1], "config, " .. knob[3]) end
  for _, size in ipairs(found.declared.derive or {}) do
    add(size[1], size[3] and "derived, " .. size[3] or "derived")
  end
  return list
end

-- "CONSTANT" and "  12" padded so that a column lines up.
local function align(list)
  local name_width, value_width, rows = 0, 0, {}
  for _, constant in ipairs(list) do
    name_width = math.max(name_width, #constant.name)
    value_width = math.max(value_width, #("%d"):format(constant.value))
  end
  for i, constant in ipairs(list) do
    rows[i] = {
      name = constant.name .. (" "):rep(name_width - #constant.name),
      value = ("%" .. value_width .. "d"):format(constant.value),
      note = constant.note,
    }
  end
  return rows
end

-- The command that prints this source again.
local function command(request, found, c, config)
  local parts = {}
  for _, fact in ipairs(facts.problem) do
    if fact.text and found.known[fact.name] ~= nil then parts[#parts + 1] = fact.text(c) end
  end
  local option = found.target_name == "cuda" and "arch" or "isa"
  local text = ("swathe emit %s --target %s --%s %s --problem %s"):format(
    request.kernel, found.target_name, option, request.isa, table.concat(parts, ","))
  return config == "" and text or text .. " --config " .. config
end

local function costs(found, c)
  local parts = {}
  for _, size in ipairs(found.declared.derive or {}) do
    parts[#parts + 1] = ("%s %d"):format(size[1], c[size[1]])
  end
  return #parts > 0 and table.concat(parts, ", ") or "nothing that is known beforehand"
end

-- What the head of a source says besides its constants.
local function head_names(request, found, c, config, sources, list)
  return {
    KERNEL = request.kernel,
    SUMMARY = found.declared.summary,
    SOURCES = table.concat(sources, ", "),
    COMMAND = command(request, found, c, config),
    COSTS = costs(found, c),
    CONSTANTS = align(list),
  }
end

-- Appends a file as it stands.
local function paste(lines, origins, name)
  local number = 0
  for line in read_text(name):gmatch("([^\n]*)\n") do
    number = number + 1
    lines[#lines + 1] = line
    origins[#origins + 1] = name .. ":" .. number
  end
end

local function append(lines, origins, name, names)
  local new_lines, new_origins = template.render(read_text(name), name, names)
  table.move(new_lines, 1, #new_lines, #lines + 1, lines)
  table.move(new_origins, 1, #new_origins, #origins + 1, origins)
end

local function flags(found)
  local list = {}
  for _, part in ipairs { found.target.flags, found.isa.flags, found.target.libraries or {} } do
    table.move(part, 1, #part, #list + 1, list)
  end
  return table.concat(list, " ")
end

-- Returns text, flags and the origins, a "file:line" per line of the text.
function emit.source(request, text)
  local found, why, status = look_up(request)
  if not found then return nil, why, status end
  if found.declared.template == false then
    return nil, ("%s is no kernel: its knobs are the library's own, nothing is emitted"):format(
      request.kernel), "BAD_USE"
  end
  local config, c = space.check(found.declared, found.known, text)
  if not config then return nil, c, "BAD_CONFIG" end

  local names, list = { ISA = request.isa }, constants(found, c)
  for _, constant in ipairs(list) do names[constant.name] = constant.value end

  local folder, suffix = "templates/" .. found.target_name .. "/", found.target.suffix
  local sources = { "templates/kernel_abi.h", folder .. "prelude" .. suffix,
                    folder .. request.kernel .. suffix }
  local lines, origins = {}, {}
  append(lines, origins, folder .. "head" .. suffix,
         head_names(request, found, c, config, sources, list))
  paste(lines, origins, sources[1])
  append(lines, origins, sources[2], names)
  append(lines, origins, sources[3], names)
  return table.concat(lines, "\n") .. "\n", flags(found), table.concat(origins, "\n") .. "\n"
end

return emit
