-- template.lua: C text with "//@ lua" lines and $(expr) splices  ->  finished text and where each
-- line came from.
--
-- Each template line becomes exactly one line of a Lua chunk that carries the template's own
-- name, so a Lua error is already at the template's file:line.  The chunk passes its line number
-- along with each text line, which gives the origins.  Knows nothing of kernels; emit.lua says
-- which names there are.

local template = {}

-- What a template may use besides the names it is given: no input or output, no loading, no
-- clock, no chance, and nothing whose order or form differs from machine to machine.
local tools = {
  ipairs = ipairs, tonumber = tonumber, tostring = tostring, type = type, select = select,
  error = error, assert = assert,
  format = string.format, rep = string.rep, concat = table.concat, unpack = table.unpack,
  min = math.min, max = math.max, tointeger = math.tointeger,
}

-- A splice's value as text.  Floats are refused: their form depends on the locale.
local function spliced(value)
  local text = type(value) == "string" and value or math.tointeger(value)
  if not text then
    local kind = math.type(value) or type(value)
    error(("$(...) gives a %s; splice whole numbers or text"):format(kind), 2)
  end
  return tostring(text)
end

-- One line of text as one line of Lua: put(12, "text" .. splice(expr) .. "text")
local function text_line(line, number, name)
  if not line:find("$(", 1, true) then return ("put(%d, %q)"):format(number, line) end
  local parts, from = {}, 1
  for start, expression, stop in line:gmatch("()%$(%b())()") do
    parts[#parts + 1] = ("%q"):format(line:sub(from, start - 1))
    parts[#parts + 1] = "splice" .. expression
    from = stop
  end
  local rest = line:sub(from)
  if rest:find("$(", 1, true) then
    error(("%s:%d: a splice $(...) without its closing parenthesis"):format(name, number), 0)
  end
  parts[#parts + 1] = ("%q"):format(rest)
  return ("put(%d, %s)"):format(number, table.concat(parts, " .. "))
end

local function compile(source, name)
  local lines = {}
  if source:sub(-1) ~= "\n" then source = source .. "\n" end
  for line in source:gmatch("([^\n]*)\n") do
    lines[#lines + 1] = line:match("^%s*//@(.*)") or text_line(line, #lines + 1, name)
  end
  return table.concat(lines, "\n")
end

-- Renders `source`, called `name` in errors, with the names of the table `names`.
-- Returns the list of lines and a list of equal length, the "file:line" each came from.
-- Raises on an unknown name, with the template's file:line.
function template.render(source, name, names)
  local lines, origins = {}, {}

  local scope = setmetatable({}, {
    __index = function(_, key)
      local value = names[key]
      if value == nil then value = tools[key] end
      if value == nil then
        error("the template names '" .. key .. "', which nothing declares", 2)
      end
      return value
    end,
    __newindex = function(_, key)
      error("the template sets '" .. key .. "'; make it local", 2)
    end,
  })
  rawset(scope, "splice", spliced)
  rawset(scope, "put", function(number, line)
    if line:find("\n", 1, true) then error("a splice may not span lines", 2) end
    lines[#lines + 1] = line
    origins[#origins + 1] = name .. ":" .. number
  end)

  load_text(compile(source, name), "@" .. name, scope)()
  return lines, origins
end

return template
