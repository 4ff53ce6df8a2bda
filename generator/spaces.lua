-- spaces.lua: everything swathe may choose, on one page.  Data only; requires nothing.
--
-- One entry per target and kernel; its template is templates/<target>/<kernel>.c.  An entry holds
--   summary   what the kernel does, in a few words
--   fixed     the facts of a problem (facts.lua) that it depends on
--   tune      knobs { name, values, what it is }; values are whole numbers
--   derive    sizes { name, function, what it is }; a size is declared before those that read it
--   require   rules { reason, function }: could not run, never overridden
--   prefer    rules { reason, function }: could run, unlikely to win; tried only when asked for everything
--   default   function that gives the rule-of-thumb value of every knob; valid for every problem
--
-- In a rule or a derived size `c` has the fixed facts, the isa's numbers (targets.lua: c.lanes, c.registers,
-- c.l1_bytes, c.l2_bytes and its name, c.isa), the knobs and the sizes; in `default` the facts and the isa only.
-- They are evaluated as soon as every knob they read is bound: cheap knobs that decide much come first.
-- In templates facts, lanes, registers, knobs and sizes are constants, in upper case.

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
      },
      derive = {
        { "rows",        function(c) return c.lanes * c.vectors end, "query rows of a tile" },
        { "tile_tokens", function(c) return c.rows // c.pack end,    "query positions of a tile" },
        { "tile_bytes",  function(c)
            return 4 * c.rows * (c.head_dim_qk + c.block_k + c.head_dim_v)
          end, "Q, scores and O of a tile, about" },
        { "block_bytes", function(c)
            return 4 * c.block_k * (c.head_dim_qk + c.head_dim_v)
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
                     c.window_left + c.window_right >= 256
        local vectors = c.gqa > 1 and wide and c.registers >= 32 and 3 or 2
        local rows = c.registers >= 32 and 8 or 6
        -- the head count that leaves the fewest lanes idle, the larger one of equals
        local pack, idle = 1, 0
        for p = 1, math.min(16, c.lanes * vectors) do
          local left = c.lanes * vectors % p
          if c.gqa % p == 0 and p ~= 9 and p ~= 11 and p ~= 13 and p ~= 15 and
             8 * left <= c.lanes * vectors and (left <= idle or p <= 8) then
            pack, idle = p, left
          end
        end
        return { vectors = vectors, pack = pack, rows_k = rows, rows_d = rows,
                 block_k = rows == 6 and 96 or 128, ring_blocks = 64 }
      end,
    },

    backward = {
      summary = "gradients of queries, and of the keys and values of their window",
      fixed = { "gqa", "head_dim_qk", "head_dim_v", "left_limited", "window_left", "right_limited",
                "window_right", "sinks", "softcap", "bf16" },
      tune = {
      },
      derive = {
      },
      require = {
      },
      prefer = {
      },
      default = function(c) return {} end,
    },

  },
}
