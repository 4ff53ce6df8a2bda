-- space.lua: a declared space and what is known  ->  its configs, lazily, always in the same order.
--
-- Knobs are bound one by one in declared order.  A derived size or rule is evaluated as soon as
-- every knob it reads is bound, so that a whole subtree falls with the first rule that refuses
-- it.  What a function reads is found out by letting it run: reading an unbound knob stops it,
-- and from then on it waits for that knob.  Checking one given config takes the same steps along
-- one path; there is no second predicate.

local space = {}

local WAIT = {}  -- raised by a read of a knob that is not bound yet

local function waits_for(walk, name)
  local depth = walk.depth_of[name]
  if not depth then return nil end
  walk.awaited = depth
  error(WAIT, 0)
end

-- What rules and derived sizes see: known facts, bound knobs and sizes as fields; anything else
-- is an error.
local function visible_names(walk, known)
  return setmetatable({}, {
    __index = function(_, name)
      local value = known[name]
      if value ~= nil then return value end
      waits_for(walk, name)
      error("a rule reads '" .. tostring(name) .. "', which nothing declares", 2)
    end,
  })
end

-- A walk at its root: no knob bound.  walk.at[depth] lists what is evaluated once `depth` knobs
-- are bound.
local function begin(declared, known, exhaustive)
  local walk = { declared = declared, depth_of = {}, at = {}, below = {}, refused = {} }
  local knobs = declared.tune
  walk.c = visible_names(walk, known)
  for depth = 0, #knobs do walk.at[depth] = {} end

  walk.below[#knobs] = 1  -- raw points under a node of that depth
  for depth = #knobs, 1, -1 do
    walk.depth_of[knobs[depth][1]] = depth
    walk.below[depth - 1] = walk.below[depth] * #knobs[depth][2]
  end

  local order = 0
  local function add(kind, list)
    for _, row in ipairs(list or {}) do
      order = order + 1
      table.insert(walk.at[0], { kind = kind, name = row[1], evaluate = row[2], order = order })
      if kind == "derive" then walk.depth_of[row[1]] = 0 end
    end
  end
  add("derive", declared.derive)
  add("require", declared.require)
  if not exhaustive then add("prefer", declared.prefer) end
  walk.items = order
  return walk
end

-- Moves an item to the depth it waits for, keeping declared order there.
local function postpone(walk, item, depth)
  local list, place = walk.at[depth], 1
  while list[place] and list[place].order < item.order do place = place + 1 end
  table.insert(list, place, item)
  if item.kind == "derive" then walk.depth_of[item.name] = depth end
end

local function bind_size(walk, name, value)
  if not math.tointeger(value) then error("the size '" .. name .. "' is not a whole number", 0) end
  walk.c[name] = math.tointeger(value)
end

-- Evaluates what became decidable at `depth`.  Returns the rule that refuses, or nil.
local function admit(walk, depth)
  local list, place = walk.at[depth], 1
  while list[place] do
    local item = list[place]
    local done, value = pcall(item.evaluate, walk.c)
    if done then
      if item.kind == "derive" then bind_size(walk, item.name, value)
      elseif not value then return item end
      place = place + 1
    elseif value ~= WAIT then
      error(value, 0)
    elseif walk.awaited <= depth then
      error(("'%s' reads a size that is declared after it"):format(item.name), 0)
    else
      table.remove(list, place)
      postpone(walk, item, walk.awaited)
    end
  end
end

-- Forgets the knob of `depth` and the sizes that hang on it.
local function unbind(walk, depth)
  walk.c[walk.declared.tune[depth][1]] = nil
  for _, item in ipairs(walk.at[depth]) do
    if item.kind == "derive" then walk.c[item.name] = nil end
  end
end

local function count_refused(walk, rule, depth)
  local entry = walk.refused[rule.order]
  if not entry then
    entry = { rule = rule.name, points = 0 }
    walk.refused[rule.order] = entry
  end
  entry.points = entry.points + walk.below[depth]
end

-- "name=value,..." in declared order: how a config travels.
local function format_config(walk)
  local parts = {}
  for depth, knob in ipairs(walk.declared.tune) do
    parts[depth] = ("%s=%d"):format(knob[1], walk.c[knob[1]])
  end
  return table.concat(parts, ",")
end

-- Returns next() and refused().
--   next()     the next valid config as text, nil after the last
--   refused()  list of { rule =, points = } in declared order: raw points turned away so far
-- Points of a subtree that falls count for the rule that felled it, so that at the end valid
-- configs and refused points add up to the whole space.
function space.walk(declared, known, exhaustive)
  local walk = begin(declared, known, exhaustive)
  local knobs = declared.tune

  local function choose(depth)
    local refusing = admit(walk, depth)
    if refusing then return count_refused(walk, refusing, depth) end
    if depth == #knobs then return coroutine.yield(format_config(walk)) end
    local name = knobs[depth + 1][1]
    for _, value in ipairs(knobs[depth + 1][2]) do
      walk.c[name] = value
      choose(depth + 1)
      unbind(walk, depth + 1)
    end
  end

  local over = false
  local step = coroutine.wrap(function() choose(0) over = true end)
  local function next_config()
    if not over then return step() end
  end
  local function refused()
    local list = {}
    for order = 1, walk.items do list[#list + 1] = walk.refused[order] end
    return list
  end
  return next_config, refused
end

-- Text from outside as it may be quoted: short and printable.
local function quoted(text)
  text = text:gsub("[^\32-\126]", "?")
  if #text > 40 then text = text:sub(1, 37) .. "..." end
  return "'" .. text .. "'"
end

-- "name=value,..." in any order -> table of texts, or nil and the reason.  Empty it may be where
-- there is nothing to choose.
local function read_config(text, knobs)
  local given = {}
  if text == "" and #knobs == 0 then return given end
  if text == "" then return nil, "the config is empty" end
  for part in (text .. ","):gmatch("([^,]*),") do
    local name, value = part:match("^([a-z][a-z0-9_]*)=(%-?%d+)$")
    if not name then return nil, quoted(part) .. " in the config is not name=number" end
    if given[name] then return nil, "the config gives '" .. name .. "' twice" end
    given[name] = value
    given[#given + 1] = name
  end
  return given
end

local function list_of(values)
  local texts = {}
  for i, value in ipairs(values) do texts[i] = ("%d"):format(value) end
  return table.concat(texts, ", ")
end

local function value_of(knob, text)
  for _, value in ipairs(knob[2]) do
    if ("%d"):format(value) == text then return value end
  end
  return nil, ("%s=%s is not one of %s"):format(knob[1], #text > 24 and quoted(text) or text,
                                                list_of(knob[2]))
end

-- Binds every knob as `given` says.  Returns the walk at that point, or nil and the reason.
local function follow(declared, known, given)
  local walk = begin(declared, known, true)
  local refusing = admit(walk, 0)
  for depth, knob in ipairs(declared.tune) do
    if refusing then break end
    local value, why = value_of(knob, given[knob[1]])
    if not value then return nil, why end
    walk.c[knob[1]] = value
    refusing = admit(walk, depth)
  end
  if refusing then return nil, "refused: " .. refusing.name end
  return walk
end

-- The one predicate: is `text` a config of this space that could run?
-- Returns its canonical text, and every name with its value; or nil and the reason.
function space.check(declared, known, text)
  local given, why = read_config(text, declared.tune)
  if not given then return nil, why end

  local is_knob, names = {}, {}
  for i, knob in ipairs(declared.tune) do
    is_knob[knob[1]] = true
    names[i] = knob[1]
  end
  for _, name in ipairs(given) do
    if #names == 0 then return nil, ("there is no knob %s, nor any"):format(quoted(name)) end
    if not is_knob[name] then
      return nil, ("there is no knob %s; there are %s"):format(
        quoted(name), table.concat(names, ", "))
    end
  end
  for _, name in ipairs(names) do
    if not given[name] then return nil, "the config lacks '" .. name .. "'" end
  end

  local walk, refused = follow(declared, known, given)
  if not walk then return nil, refused end
  return format_config(walk), walk.c
end

-- The space's rule-of-thumb config, through the same predicate.  Raises if it is not valid: that
-- would be a mistake in the declaration.
function space.default(declared, known)
  local c = setmetatable({}, {
    __index = function(_, name)
      local value = known[name]
      if value == nil then
        error("the default reads '" .. tostring(name) .. "', which is not known", 2)
      end
      return value
    end,
  })
  local parts, values, left = {}, declared.default(c), 0
  for _ in pairs(values) do left = left + 1 end
  for i, knob in ipairs(declared.tune) do
    local value = math.tointeger(values[knob[1]])
    if not value then
      error("the default config gives no whole number for '" .. knob[1] .. "'", 0)
    end
    parts[i] = ("%s=%d"):format(knob[1], value)
    left = left - 1
  end
  if left ~= 0 then error("the default config gives a knob that is not declared", 0) end
  local config, why = space.check(declared, known, table.concat(parts, ","))
  if not config then
    error(("the default config %s is not valid: %s"):format(table.concat(parts, ","), why), 0)
  end
  return config
end

return space
