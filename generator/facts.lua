-- facts.lua: what a kernel can depend on: facts of the problem and of the isa.  Data only;
-- requires nothing.
--
-- Rules and derived sizes read these in lower case (c.gqa), kernels as constants in upper case
-- (GQA). What no kernel fixes (ranks, layout, tokens, the scale, how many heads there are in all)
-- reaches it as an argument or not at all, so it cannot change a kernel's text.

local unlimited = math.maxinteger

local function limited(window) return window == unlimited and 0 or 1 end
local function flag(condition) return condition and 1 or 0 end

-- A window as a kernel sees it, 0 where there is no limit; and as a problem's text says it.
local function tokens(window) return window == unlimited and 0 or window end
local function window_text(name, is_limited, window)
  return name .. "=" .. (is_limited == 1 and ("%d"):format(window) or "unlimited")
end

return {
  problem = {
    -- value is read from a problem; text is how a problem's text says it, from the facts themselves
    { name = "gqa", note = "query heads that share a key head",
      value = function(p) return p.q_heads // p.kv_heads end,
      text = function(c) return ("q_heads=%d,kv_heads=1"):format(c.gqa) end },
    { name = "head_dim_qk", note = "elements of a query or key row",
      value = function(p) return p.head_dim_qk end,
      text = function(c) return ("head_dim_qk=%d"):format(c.head_dim_qk) end },
    { name = "head_dim_v", note = "elements of a value or output row",
      value = function(p) return p.head_dim_v end,
      text = function(c) return ("head_dim_v=%d"):format(c.head_dim_v) end },
    { name = "left_limited", note = "whether WINDOW_LEFT bounds the keys before a query",
      value = function(p) return limited(p.window_left) end },
    { name = "window_left", note = "keys seen before the query's own",
      value = function(p) return tokens(p.window_left) end,
      text = function(c) return window_text("window_left", c.left_limited, c.window_left) end },
    { name = "right_limited", note = "whether WINDOW_RIGHT bounds the keys after a query",
      value = function(p) return limited(p.window_right) end },
    { name = "window_right", note = "keys seen after the query's own",
      value = function(p) return tokens(p.window_right) end,
      text = function(c) return window_text("window_right", c.right_limited, c.window_right) end },
    { name = "bf16", note = "elements are bfloat16, not float",
      value = function(p) return flag(p.dtype == "bf16") end,
      text = function(c) return c.bf16 == 1 and "dtype=bf16" or "dtype=f32" end },
    { name = "f16", note = "elements are IEEE half precision, not bfloat16",
      value = function(p) return flag(p.dtype == "f16") end,
      text = function(c) return c.f16 == 1 and "dtype=f16" or "dtype=bf16" end },
    { name = "sinks", note = "whether a logit per head joins each row's sum",
      value = function(p) return flag(p.sinks) end,
      text = function(c) return ("sinks=%d"):format(c.sinks) end },
    { name = "softcap", note = "whether scores pass through cap * tanh(score / cap)",
      value = function(p) return flag(p.softcap > 0) end,
      text = function(c) return ("softcap=%d"):format(c.softcap) end },
    -- for the exchange only, which is no kernel
    { name = "ranks", note = "ranks of the group", value = function(p) return p.ranks end },
    { name = "share_tokens", note = "tokens of a rank",
      value = function(p) return p.tokens_per_rank end },
    { name = "halo_tokens", note = "most tokens that one end of a span needs",
      value = function(p)
        local window = math.max(p.window_left, p.window_right)
        return math.min(window, p.tokens_per_rank * math.max(0, p.ranks - 1))
      end },
    { name = "token_bytes", note = "keys and values of a token, all heads",
      value = function(p)
        return p.kv_heads * (p.head_dim_qk + p.head_dim_v) * (p.dtype == "f32" and 4 or 2)
      end },
  },
  isa = {
    { name = "lanes", note = "floats in a vector" },
    { name = "registers", note = "vectors the machine can name" },
  },
}
