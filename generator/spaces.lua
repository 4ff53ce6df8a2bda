-- spaces.lua: everything swathe may choose, on one page.  Data only; requires nothing.
--
-- One entry per target and kernel; its template is templates/<target>/<kernel>.c.  An entry holds
--   summary   what the kernel does, in a few words
--   fixed     the facts of a problem (facts.lua) that it depends on
--   tune      knobs { name, values, what it is }; values are whole numbers
--   derive    sizes { name, function, what it is }; a size is declared before those that read it
--   require   rules { reason, function }: could not run, never overridden
--   prefer    rules { reason, function }: could run, unlikely to win; kept for an exhaustive walk
--   default   function that gives the rule-of-thumb value of every knob; valid for every problem
--
-- In a rule or a size `c` has the fixed facts, the isa's name and numbers (targets.lua: c.isa,
-- c.lanes, c.registers, c.l1_bytes, c.l2_bytes), the knobs and the sizes; in `default` the facts
-- and the isa only.  They are evaluated as soon as every knob they read is bound: knobs that decide
-- much come first.  In templates facts, lanes, registers, knobs and sizes are upper-case constants.

return {
  cpu = {

    forward = {
      summary = "queries against the keys of their window: out and lse",
      fixed = { "gqa", "head_dim_qk", "head_dim_v", "left_limited", "window_left", "right_limited",
                "window_right", "sinks", "softcap", "bf16" },
      tune = {
        { "vectors",     { 1, 2, 3, 4 },            "vectors of query rows in a tile" },
        { "pack",        { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32 },
                                                    "query heads of one key head in a tile" },
        { "rows_k",      { 4, 6, 8, 12, 16 },       "keys whose scores stay in registers" },
        { "rows_d",      { 4, 6, 8, 12, 16 },       "output dims that stay in registers" },
        { "block_k",     { 48, 64, 96, 128, 192, 256 }, "keys in a packed block" },
        { "ring_blocks", { 16, 64, 256 },           "most packed blocks a thread keeps" },
        { "prefetch",    { 0, 8, 16 },  "cache lines of the next queries per rows_k keys" },
        { "stream",      { 0, 1 },                  "whether out is written past the cache" },
      },
      derive = {
        { "step",        function(c) return c.bf16 == 1 and c.bf16_pairs == 1 and 2 or 1 end,
          "elements that a multiply-add takes from a row" },
        { "rows",        function(c) return c.lanes * c.vectors end, "query rows of a tile" },
        { "tile_tokens", function(c) return c.rows // c.pack end,    "query positions of a tile" },
        { "tile_bytes",  function(c)
            return 4 * c.rows * (c.head_dim_qk // c.step + c.block_k + c.head_dim_v)
          end, "Q, scores and O of a tile, about" },
        { "block_bytes", function(c)
            return 4 * c.block_k * (c.head_dim_qk + c.head_dim_v) // c.step
          end, "a packed block of keys and values, about" },
      },
      require = {
        { "pack divides the GQA ratio", function(c) return c.gqa % c.pack == 0 end },
        { "a tile holds at least one query position", function(c) return c.pack <= c.rows end },
        { "the scores' accumulators, a row of queries and a key fit the registers", function(c)
            return (c.rows_k + 1) * c.vectors + 1 <= c.registers
          end },
        { "the output's accumulators, a row of scores and a value fit the registers", function(c)
            return (c.rows_d + 1) * c.vectors + 1 <= c.registers
          end },
        { "a block is a whole number of rows_k", function(c) return c.block_k % c.rows_k == 0 end },
        { "only whole cache lines can bypass the cache", function(c)
            return c.stream == 0 or c.lanes == 16 and c.step == 1 + c.bf16 and
                   c.head_dim_v % (16 * c.step) == 0
          end },
      },
      prefer = {
        { "at most an eighth of the lanes idles", function(c)
            return 8 * (c.rows - c.tile_tokens * c.pack) <= c.rows
          end },
        { "there are accumulators enough to hide the latency of an FMA", function(c)
            return c.vectors * c.rows_k >= 8 and c.vectors * c.rows_d >= 8
          end },
        { "the scores of a block stay in half of L1", function(c)
            return 4 * c.rows * c.block_k <= c.l1_bytes // 2
          end },
        { "rows_d is no wider than the output", function(c)
            return c.rows_d <= math.max(4, c.head_dim_v)
          end },
        { "a limited window needs no choice of ring", function(c)
            return c.ring_blocks == 64 or c.left_limited == 0 or c.right_limited == 0
          end },
      },
      default = function(c)
        local wide = c.left_limited == 0 or c.right_limited == 0 or
                     c.window_left >= 256 or c.window_right >= 256
        local vectors, keys = 2, 4                   -- 16 registers of four floats
        if c.lanes == 16 then
          vectors, keys = wide and c.gqa > 1 and 3 or not wide and c.gqa == 1 and 1 or 2, 8
        elseif c.lanes == 8 then
          if wide or c.gqa > 1 then vectors, keys = 3, 4 else vectors, keys = 2, 6 end
        elseif c.registers >= 32 then
          vectors, keys = 4, 6
        end
        if vectors == 1 and c.bf16 == 1 and c.bf16_pairs == 1 and c.head_dim_v % 16 == 0 then
          keys = 16                                  -- half the loads of each word of queries
        end
        local rows = c.lanes * vectors

        -- the most useful work per lane: lanes that hold a row, keys of a tile that a row sees
        local pack, best = 1, 0
        local window = wide and 1024 or c.window_left + c.window_right + 1
        for _, heads in ipairs { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 } do
          local tokens = rows // heads
          local useful = heads * tokens / rows * window / (window + tokens - 1)
          if c.gqa % heads == 0 and tokens > 0 and useful >= best then
            pack, best = heads, useful
          end
        end
        local lines = c.lanes == 16 and c.bf16_pairs >= c.bf16 and
                      c.head_dim_v % (16 + 16 * c.bf16) == 0
        local stream = not wide and lines
        return { vectors = vectors, pack = pack, rows_k = keys, rows_d = keys,
                 block_k = keys % 8 == 0 and 128 or 96, ring_blocks = 64, prefetch = 16,
                 stream = stream and 1 or 0 }
      end,
    },

    backward = {
      summary = "gradients of queries, and of the keys and values of their window",
      fixed = { "gqa", "head_dim_qk", "head_dim_v", "left_limited", "window_left", "right_limited",
                "window_right", "sinks", "softcap", "bf16" },
      tune = {
        { "vectors",     { 1, 2, 3, 4 },            "vectors of query rows in a panel" },
        { "pack",        { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32 },
                                                    "query heads of one key head in a panel" },
        { "panels",      { 1, 2, 3, 4, 6, 8 },      "panels of a tile, one after the other" },
        { "rows_k",      { 4, 6, 8, 12, 16 },       "keys whose scores stay in registers" },
        { "rows_d",      { 2, 4, 8, 16 },           "dims of dq that stay in registers" },
        { "rows_j",      { 4, 6, 8, 12, 16 },       "keys whose dk or dv stay in registers" },
        { "vectors_d",   { 1, 2, 3, 4, 5 },         "vectors of dims of dk or dv in registers" },
        { "block_k",     { 48, 64, 96, 128, 192 },  "keys in a packed block" },
        { "ring_blocks", { 32, 128, 512 },          "most packed blocks a thread keeps" },
        { "pairs",       { 0, 1 },                  "whether P and dS are rounded to bf16 pairs" },
      },
      derive = {
        { "step",          function(c) return 1 + c.pairs end,
          "elements that a multiply-add takes from a row" },
        { "panel_tokens",  function(c) return c.lanes * c.vectors // c.pack end,
          "query positions of a panel" },
        { "tile_tokens",   function(c) return c.panel_tokens * c.panels end,
          "query positions of a tile" },
        { "key_vectors",   function(c)
            local step = math.max(c.lanes, c.rows_d)
            return (c.head_dim_qk + step - 1) // step * step // c.lanes
          end, "vectors that hold a key's dims" },
        { "value_vectors", function(c) return (c.head_dim_v + c.lanes - 1) // c.lanes end,
          "vectors that hold a value's dims" },
        { "tile_bytes",    function(c)
            local words = 2 * c.lanes * (c.key_vectors + c.value_vectors) // c.step
            local scores = c.step == 1 and 2 or 3
            return 4 * c.lanes * c.vectors * c.panels *
                   (words + c.lanes * c.key_vectors + scores * c.block_k)
          end, "Q, dO, dQ, P and dS of a tile, about" },
        { "block_bytes",   function(c)
            local keys, values = c.lanes * c.key_vectors, c.lanes * c.value_vectors
            local packed = c.step == 1 and keys + values or (2 * keys + values) // 2
            return 4 * c.block_k * (packed + keys + values)
          end, "a packed block of keys and values with the sums of their gradients" },
      },
      require = {
        { "pairs are for bf16 where the isa multiplies them", function(c)
            return c.pairs == 0 or c.bf16 == 1 and c.bf16_pairs == 1
          end },
        { "pack divides the GQA ratio", function(c) return c.gqa % c.pack == 0 end },
        { "a panel holds at least one query position", function(c) return c.panel_tokens >= 1 end },
        { "the scores' accumulators, a row of queries and a key fit the registers", function(c)
            return (c.rows_k + 1) * c.vectors + 1 <= c.registers
          end },
        { "the accumulators of dq, a row of dS and a key fit the registers", function(c)
            return (c.rows_d + 1) * c.vectors + 1 <= c.registers
          end },
        { "the accumulators of dk, a row of Q and a weight fit the registers", function(c)
            return (c.rows_j + 1) * c.vectors_d + 1 <= c.registers
          end },
        { "one of rows_k and rows_j is a multiple of the other", function(c)
            return math.max(c.rows_k, c.rows_j) % math.min(c.rows_k, c.rows_j) == 0
          end },
        { "vectors_d divides the vectors of a key and of a value", function(c)
            return c.key_vectors % c.vectors_d == 0 and c.value_vectors % c.vectors_d == 0
          end },
        { "a block is a whole number of rows_k and of rows_j", function(c)
            return c.block_k % c.rows_k == 0 and c.block_k % c.rows_j == 0
          end },
      },
      prefer = {
        -- a sum over the heads of a few large weights, as at a document's start, is then off by up
        -- to 2e-2 of N(0,1) data, against 4e-3
        { "weights keep the precision of fp32", function(c) return c.pairs == 0 end },
        { "at most an eighth of the lanes idles", function(c)
            local rows = c.lanes * c.vectors
            return 8 * (rows - c.panel_tokens * c.pack) <= rows
          end },
        { "there are accumulators enough to hide the latency of an FMA", function(c)
            return c.vectors * math.min(c.rows_k, c.rows_d) >= 8 and c.vectors_d * c.rows_j >= 8
          end },
        { "a tile has 32 to 256 rows", function(c)
            local rows = c.lanes * c.vectors * c.panels
            return 32 <= rows and rows <= 256
          end },
        { "a tile is no longer than the window", function(c)
            return c.left_limited == 0 or c.right_limited == 0 or c.panels == 1 or
                   c.tile_tokens <= c.window_left + c.window_right + 1
          end },
        { "a tile stays in the L2", function(c) return c.tile_bytes <= c.l2_bytes end },
        { "a limited window needs no choice of ring", function(c)
            return c.ring_blocks == 128 or c.left_limited == 0 or c.right_limited == 0
          end },
      },
      default = function(c)
        local many = c.registers >= 32
        local limited = c.left_limited == 1 and c.right_limited == 1
        local window = limited and c.window_left + c.window_right + 1 or 4096
        -- what a panel computes for each pair of query and key that see each other: it sees more
        -- keys than each of its queries, some lanes idle, one vector alone asks for more loads
        local vectors, pack, least = 2, 1, math.huge
        for v = 2, many and 1 or 2, -1 do
          for _, p in ipairs { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 } do
            local rows = c.lanes * v
            if c.gqa % p == 0 and p <= rows then
              local tokens = rows // p
              local work = (window + tokens + 7) / window * rows / (tokens * p)
              if v == 1 then work = 1.08 * work end
              if work <= least then vectors, pack, least = v, p, work end
            end
          end
        end
        -- about 64 rows; far more when each tile fetches the packed window from beyond the L2
        local panels = 64 // (c.lanes * vectors)
        local fetched = 8 * window * (c.head_dim_qk + c.head_dim_v)
        if fetched > 3 * c.l2_bytes then panels = 4 * panels end
        panels = math.max(1, math.min(8, panels))

        local rows, rows_d = many and 8 or 6, many and 8 or 4
        local step = math.max(c.lanes, rows_d)
        local key_vectors = (c.head_dim_qk + step - 1) // step * step // c.lanes
        local value_vectors = (c.head_dim_v + c.lanes - 1) // c.lanes
        local vectors_d = 1
        for wider = 2, many and 4 or 2 do
          if key_vectors % wider == 0 and value_vectors % wider == 0 then vectors_d = wider end
        end
        return { vectors = vectors, pack = pack, panels = panels, rows_k = rows, rows_d = rows_d,
                 rows_j = vectors_d == 4 and 4 or rows, vectors_d = vectors_d,
                 block_k = many and 64 or 96, ring_blocks = 128, pairs = 0 }
      end,
    },

  },
}
