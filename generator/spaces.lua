-- spaces.lua: everything swathe may choose, on one page.  Data only; requires nothing.
--
-- One entry per target and kernel; its template is templates/<target>/<kernel>.c or .cu.  The
-- exchange is an entry without a template (`template = false`): runtime/exchange.c goes by its
-- knobs.  An entry
-- holds
--   summary   what the kernel does, in a few words
--   fixed     the facts of a problem (facts.lua) that it depends on
--   tune      knobs { name, values, what it is }; values are whole numbers
--   derive    sizes { name, function, what it is }; a size is declared before those that read it
--   require   rules { reason, function }: could not run, never overridden
--   prefer    rules { reason, function }: could run, unlikely to win; kept for an exhaustive walk
--   default   function that gives the rule-of-thumb value of every knob; valid for every problem
--
-- In a rule or a size `c` has the fixed facts, the isa's name and numbers (targets.lua: c.isa, and
-- on the cpu c.lanes, c.registers, c.l1_bytes, c.l2_bytes, on cuda c.most_shared_bytes,
-- c.most_registers, c.hopper), the knobs and the sizes; in `default` the facts and the isa only.
-- They are evaluated as soon as every knob they read is bound: knobs that decide much come first.
-- In templates facts, lanes, registers, knobs and sizes are upper-case constants.

-- What both passes of attention depend on.
local attention_facts = {
  cpu = { "gqa", "head_dim_qk", "head_dim_v", "left_limited", "window_left", "right_limited",
          "window_right", "sinks", "softcap", "bf16" },
  cuda = { "gqa", "head_dim_qk", "head_dim_v", "left_limited", "window_left", "right_limited",
           "window_right", "f16", "sinks", "softcap" },
}

-- ---- Tiles of the cuda kernels ------------------------------------------------------------------

-- Elements of a row in whole products; 16-byte chunks from one row of a tile to the next, as
-- templates/cuda/prelude.cu lays them (PITCH there).
local function padded(dim) return (dim + 15) // 16 * 16 end
local function pitch(dim)
  local chunks = padded(dim) // 8
  return chunks % 8 == 0 and chunks or chunks | 1
end

-- Keys that one query sees; a window without limit counts as one far wider than any tile.
local function window_keys(c)
  if c.left_limited == 0 or c.right_limited == 0 then return 1 << 20 end
  return c.window_left + 1 + c.window_right
end

-- A forward tile's numbers, from its knobs and the facts.
local forward_tile
forward_tile = {
  rows = function(c) return c.warps * c.warp_rows end,
  one_tile = function(c, tokens) return window_keys(c) + tokens - 1 <= c.block_k and 1 or 0 end,
  q_bytes = function(c)
    return c.warps * c.warp_rows * math.max(pitch(c.head_dim_qk), pitch(c.head_dim_v)) * 16
  end,
  shared_bytes = function(c, keys)
    return (c.strip > 1 and 2 or 1) * forward_tile.q_bytes(c) +
           keys * (pitch(c.head_dim_qk) + pitch(c.head_dim_v)) * 16
  end,
  -- keys whose rows are in shared memory
  keys = function(c, one_tile, tokens)
    if one_tile == 1 then return c.block_k + (c.strip - 1) * tokens end
    return c.stages * c.block_k
  end,
  -- S and O, or P and O where no running maximum needs O while there is S; operands, addresses (one
  -- stage needs more: the compiler then keeps what depends on the stage)
  registers = function(c, one_tile)
    local bands = c.warp_rows // 16
    local s, o = bands * c.block_k // 2, bands * padded(c.head_dim_v) // 2
    local q = c.q_in_regs * bands * padded(c.head_dim_qk) // 4
    local others = 76 + (c.head_dim_qk > 128 and 10 or 0) + 4 * c.softcap +
                   (one_tile == 0 and c.stages == 1 and 12 or 0)
    return q + others + (one_tile == 1 and math.max(s, s // 2 + o) or s + o)
  end,
  -- 1000 times the products made over those of visible pairs, of a tile amid a long document.  A
  -- warp, or a warpgroup, leaves out the key tiles that none of its queries sees.
  counted = function(c, tokens)
    local window, made, rows = window_keys(c), 0, c.wgmma == 1 and 64 or c.warp_rows
    for row = 0, c.warps * c.warp_rows - 1, rows do
      local first = row // c.pack
      local last = math.min(tokens - 1, (row + rows - 1) // c.pack)
      if first <= last then
        local tiles = (last + window - 1) // c.block_k - first // c.block_k + 1
        made = made + tiles * c.block_k * rows
      end
    end
    local dims = padded(c.head_dim_qk) + padded(c.head_dim_v)
    return 1000 * made * dims // (tokens * c.pack * window * (c.head_dim_qk + c.head_dim_v))
  end,
}

-- Blocks that a multiprocessor holds, about.
function forward_tile.blocks(c, shared_bytes, registers)
  registers = (math.min(registers, 255) + 7) // 8 * 8
  return math.min((c.most_shared_bytes + 1024) // (shared_bytes + 1024),
                  c.most_registers // (registers * 32 * c.warps))
end

-- What a default may be, the plainest first: each pack with the widest tiles that could serve it.
function forward_tile.candidates(c)
  local list = {}
  local function add(pack, warps, warp_rows, block_k)
    for _, ahead in ipairs { { 1, 1 }, { 2, 1 }, { 1, 4 } } do
      list[#list + 1] = { wgmma = 0, pack = pack, warps = warps, warp_rows = warp_rows,
                          block_k = block_k, stages = ahead[1], strip = ahead[2], q_in_regs = 0,
                          min_blocks = 1 }
    end
  end
  for _, shape in ipairs { { 2, 16 }, { 4, 16 }, { 8, 16 }, { 4, 32 } } do
    local rows = shape[1] * shape[2]
    for _, pack in ipairs { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 } do
      if c.gqa % pack == 0 then
        local fit = (window_keys(c) + rows // pack - 1 + 15) // 16 * 16
        for _, block_k in ipairs { 16, 32, 48, 64, 80, 96, 112, 128 } do
          add(pack, shape[1], shape[2], block_k)
        end
        if fit > 128 and fit <= 192 then add(pack, shape[1], shape[2], fit) end
      end
    end
  end
  return list
end

-- About the time of a visible pair in such a tile, in products; nil where it does not fit.
function forward_tile.cost(c, knobs)
  setmetatable(knobs, { __index = c })
  local rows = forward_tile.rows(knobs)
  local tokens = rows // knobs.pack
  local one_tile = forward_tile.one_tile(knobs, tokens)
  local shared = forward_tile.shared_bytes(knobs, forward_tile.keys(knobs, one_tile, tokens))
  local registers = forward_tile.registers(knobs, one_tile)
  local blocks = forward_tile.blocks(knobs, shared, registers)
  if shared > c.most_shared_bytes or registers > 255 then return nil end
  if one_tile == 1 and knobs.stages > 1 then return nil end
  if knobs.strip > 1 and (one_tile == 0 or tokens % 8 ~= 0) then return nil end
  -- a product; the operands it shares with the other band of a warp; the keys' way to the block,
  -- once for all its rows; what goes by tiles, not by keys; loads that nothing else hides
  local keys = 16 / knobs.warp_rows + 48 / rows +
               (one_tile == 1 and 0.4 / knobs.strip or 12 / knobs.block_k + 0.2 / knobs.stages)
  return forward_tile.counted(knobs, tokens) / 1000 * (1 + keys) *
         (1 + 1 / (knobs.warps * blocks))
end

-- `count` filled up to whole groups.
local function up_to(count, group) return (count + group - 1) // group * group end

-- A key and its value, or a query row and its dout, in shared memory.
local function pair_bytes(c) return 16 * (pitch(c.head_dim_qk) + pitch(c.head_dim_v)) end

-- 1000 times the products made over those of visible pairs, amid a long document, when for `pairs`
-- pairs `qk` and `v` products over the dims of a key and of a value are made, and they are needed
-- for each of `seen`, one of them less over the dims of a key where `again`.
local function products_permille(c, pairs, seen, qk, v, again)
  local made = qk * padded(c.head_dim_qk) + v * padded(c.head_dim_v)
  return 1000 * pairs * made // (seen * ((qk - again) * c.head_dim_qk + v * c.head_dim_v))
end

-- The most heads of one key head that leave less than one part in `parts` of a tile's rows idle.
local function most_heads(c, rows, parts)
  local most = 1
  for heads = 2, 16 do
    if c.gqa % heads == 0 and parts * (rows % heads) < rows then most = heads end
  end
  return most
end

-- Pairs that a tile of dq multiplies: each warp, or warpgroup, leaves out the chunks of keys that
-- none of its queries sees.
local function dq_pairs(c)
  local window, chunk, chunks = window_keys(c), 16 * c.dq_wide, 0
  local own = c.wgmma == 1 and 64 or 16 * c.dq_tall
  for row = 0, 16 * c.dq_tall * c.dq_warps - 1, own do
    local first = row // c.dq_pack
    local last = math.min((row + own - 1) // c.dq_pack, c.dq_tokens - 1)
    if first <= last then
      chunks = chunks + (last + window - 1) // chunk - first // chunk + 1
    end
  end
  return chunks * chunk * own
end

-- Pairs that a tile of dkv multiplies, likewise: its chunks of query rows begin anew in each step.
local function dkv_pairs(c)
  local window, chunk, chunks = window_keys(c), 16 * c.dkv_wide, 0
  local own = c.wgmma == 1 and 64 or 16 * c.dkv_tall
  local step = c.dkv_tokens
  local step_chunks = (step * c.dkv_pack + chunk - 1) // chunk
  for first = 0, 16 * c.dkv_tall * c.dkv_warps - 1, own do
    local last = first + own - 1 + window - 1
    chunks = chunks + last // step * step_chunks +
             (last % step * c.dkv_pack + c.dkv_pack - 1) // chunk -
             (first // step * step_chunks + first % step * c.dkv_pack // chunk) + 1
  end
  return chunks * chunk * own * (c.gqa // c.dkv_pack)
end

-- The keys and values that one query sees, as the cpu's forward packs them.
local function packed_window_bytes(c)
  local elem = c.bf16 == 1 and c.bf16_pairs == 1 and 2 or 4
  return elem * window_keys(c) * (c.head_dim_qk + c.head_dim_v)
end

-- How keys, and sums on their way home, travel: the same on all ranks of a group.  A target whose
-- passes move a halo in one way only says so by `knobs` of one value each.
local function exchange(knobs)
  return {
    summary = "how the halo travels beside the work",
    template = false,
    fixed = { "ranks", "share_tokens", "halo_tokens", "token_bytes" },
    tune = {
      { "overlap",  knobs.overlap,
        "0: wait at once, 1: units without halo meanwhile, 2: then each as its keys come" },
      { "chunks",   knobs.chunks,   "messages a peer's keys are cut into, nearest first" },
      { "together", knobs.together, "whether K and V travel in one message" },
      { "order",    knobs.order,    "0: peer by peer, 1: the nearest chunks of all peers first" },
      { "poll",     knobs.poll,     "items between two looks at the messages" },
      { "progress", knobs.progress,
        "us that a thread beside the work sleeps between its looks; 0: no thread" },
    },
    derive = {
      { "chunk_bytes", function(c) return c.halo_tokens * c.token_bytes // c.chunks end,
        "of a message, at the most" },
    },
    require = {},
    prefer = {
      { "one rank has nothing to exchange", function(c)
          return c.ranks > 1 or c.overlap == 1 and c.chunks == 1 and c.together == 1 and
                 c.order == 0 and c.poll == 1 and c.progress == 0
        end },
      { "chunks are for units that begin as theirs come", function(c)
          return c.chunks == 1 or c.overlap == 2
        end },
      { "a chunk has 32 KiB at least", function(c)
          return c.chunks == 1 or c.chunk_bytes >= 32768
        end },
      { "peers take turns where there are chunks", function(c)
          return c.order == 0 or c.chunks > 1
        end },
      { "who waits at once needs no looks in between", function(c)
          return c.overlap > 0 or c.poll == 1 and c.progress == 0
        end },
      { "who has a thread looks seldom itself", function(c)
          return c.progress == 0 or c.poll == knobs.poll[#knobs.poll]
        end },
    },
    -- the interior hides the halo's way, unless most of a share sees the halo: then its nearest
    -- parts let some of that share begin
    default = function(c)
      local edge = knobs.overlap[3] and 2 * c.halo_tokens > c.share_tokens
      local chunks = edge and 4 or 1
      if c.halo_tokens * c.token_bytes // chunks < 32768 then chunks = 1 end
      return { overlap = chunks > 1 and 2 or 1, chunks = chunks, together = 1, order = 0, poll = 1,
               progress = 0 }
    end,
  }
end

return {
  cpu = {

    exchange = exchange {
      overlap = { 0, 1, 2 }, chunks = { 1, 2, 4, 8 }, together = { 0, 1 }, order = { 0, 1 },
      poll = { 1, 4 }, progress = { 0, 50, 200 },
    },

    forward = {
      summary = "queries against the keys of their window: out and lse",
      fixed = attention_facts.cpu,
      tune = {
        { "vectors",     { 1, 2, 3, 4 },            "vectors of query rows in a tile" },
        { "pack",        { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32 },
                                                    "query heads of one key head in a tile" },
        { "strip",       { 1, 2, 4, 8 },            "tiles that take a block of keys in turn" },
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
            return 4 * c.rows * (c.strip * (c.head_dim_qk // c.step + c.head_dim_v) + c.block_k)
          end, "Q and O of a strip and scores of a tile, about" },
        { "block_bytes", function(c)
            return 4 * c.block_k * (c.head_dim_qk + c.head_dim_v) // c.step
          end, "a packed block of keys and values, about" },
        { "counted_permille", function(c)
            local keys = window_keys(c) + c.tile_tokens - 1
            local made = up_to(keys, c.rows_k) * up_to(c.head_dim_qk, c.step) +
                         keys * up_to(c.head_dim_v, c.rows_d)
            local seen = c.tile_tokens * c.pack * window_keys(c)
            return 1000 * c.rows * made // (seen * (c.head_dim_qk + c.head_dim_v))
          end, "products made over those of visible pairs, amid a long document" },
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
            return c.stream == 0 or c.lanes >= 8 and c.step == 1 + c.bf16 and
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
        { "a window that the L2 holds needs no strip", function(c)
            return c.strip == 1 or packed_window_bytes(c) > c.l2_bytes
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
        local lines = c.lanes >= 8 and c.bf16_pairs >= c.bf16 and
                      c.head_dim_v % (16 + 16 * c.bf16) == 0
        local stream = not wide and lines

        -- tiles that fetch the packed window from beyond the L2 share what they fetch
        local fetched = packed_window_bytes(c)
        local strip = fetched >= 8 * c.l2_bytes and 8 or fetched > 3 * c.l2_bytes and 4 or 1
        return { vectors = vectors, pack = pack, strip = strip, rows_k = keys, rows_d = keys,
                 block_k = keys % 8 == 0 and 128 or 96, ring_blocks = 64, prefetch = 16,
                 stream = stream and 1 or 0 }
      end,
    },

    backward = {
      summary = "gradients of queries, and of the keys and values of their window",
      fixed = attention_facts.cpu,
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
        { "counted_permille", function(c)
            local keys = up_to(window_keys(c) + c.panel_tokens - 1, math.max(c.rows_k, c.rows_j))
            local made = up_to(c.head_dim_qk, c.step) + up_to(c.head_dim_v, c.step) +
                         c.lanes * (2 * c.key_vectors + c.value_vectors)
            local seen = c.panel_tokens * c.pack * window_keys(c)
            return 1000 * c.lanes * c.vectors * keys * made //
                   (seen * (3 * c.head_dim_qk + 2 * c.head_dim_v))
          end, "products made over those of visible pairs, amid a long document" },
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
        { "a tile has two vectors of rows at least, and at most 256 rows", function(c)
            return c.vectors * c.panels >= 2 and c.lanes * c.vectors * c.panels <= 256
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
        -- about 64 rows; far more when each tile fetches the packed window from beyond the L2.  (An
        -- L2 of half the size is full with those: only a far wider window pays for them there.)
        local panels, dims = 64 // (c.lanes * vectors), c.head_dim_qk + c.head_dim_v
        local far = 8 * window * dims > 3 * c.l2_bytes
        if c.lanes == 8 then far = window > 2048 end
        if far then panels = 4 * panels end
        panels = math.max(1, math.min(8, panels))

        local rows, rows_d = many and 8 or 6, many and 8 or 4
        local step = math.max(c.lanes, rows_d)
        local key_vectors = (c.head_dim_qk + step - 1) // step * step // c.lanes
        local value_vectors = (c.head_dim_v + c.lanes - 1) // c.lanes
        local vectors_d = 1
        for wider = 2, many and 4 or 2 do
          if key_vectors % wider == 0 and value_vectors % wider == 0 then vectors_d = wider end
        end
        -- with half the keys in a block where that lets a tile and a block share the L2
        local function together(keys)
          return 4 * c.lanes * vectors * panels * (2 * dims + c.head_dim_qk + 2 * keys) +
                 8 * keys * dims
        end
        local block_k = many and 64 or 96
        local most = 3 * c.l2_bytes // 4
        if not many and together(96) > most and together(48) <= most then block_k = 48 end
        return { vectors = vectors, pack = pack, panels = panels, rows_k = rows, rows_d = rows_d,
                 rows_j = vectors_d == 4 and 4 or rows, vectors_d = vectors_d,
                 block_k = block_k, ring_blocks = 128, pairs = 0 }
      end,
    },

  },

  cuda = {

    -- all that travels together is one group on a stream, which nobody looks at
    exchange = exchange {
      overlap = { 0, 1, 2 }, chunks = { 1, 2, 4, 8 }, together = { 0, 1 }, order = { 0 },
      poll = { 1 }, progress = { 0 },
    },

    forward = {
      summary = "queries against the keys of their window: out and lse",
      fixed = attention_facts.cuda,
      tune = {
        { "wgmma",      { 0, 1 },                   "whether warpgroups multiply, with wgmma" },
        { "pack",       { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32 },
                                                    "query heads of one key head in a tile" },
        { "warps",      { 2, 4, 8 },                "warps of a block" },
        { "warp_rows",  { 16, 32 },                 "query rows of a warp" },
        { "block_k",    { 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240,
                          256 },                    "keys of a tile" },
        { "stages",     { 1, 2, 3 },                "tiles of keys and values in shared memory" },
        { "strip",      { 1, 2, 4, 8, 16 },         "tiles of queries of a block, where one of "
                                                    .. "keys serves each" },
        { "q_in_regs",  { 0, 1 },                   "whether queries stay in registers" },
        { "min_blocks", { 1, 2, 3, 4 },  "blocks of a multiprocessor that registers must do for" },
      },
      derive = {
        { "rows",        forward_tile.rows,         "query rows of a tile" },
        { "threads",     function(c) return 32 * c.warps end, "of a block" },
        { "tile_tokens", function(c) return c.rows // c.pack end, "query positions of a tile" },
        { "one_tile",    function(c) return forward_tile.one_tile(c, c.tile_tokens) end,
          "whether all keys of a tile of queries fit one tile" },
        { "q_bytes",     forward_tile.q_bytes,      "the queries of a tile, later its out" },
        { "q_tiles",     function(c) return c.strip > 1 and 2 or 1 end,
          "of queries in shared memory" },
        { "keys",        function(c) return forward_tile.keys(c, c.one_tile, c.tile_tokens) end,
          "whose rows are in shared memory" },
        { "shared_bytes", function(c) return forward_tile.shared_bytes(c, c.keys) end,
          "of a block" },
        { "thread_registers", function(c) return forward_tile.registers(c, c.one_tile) end,
          "of a thread, about" },
        { "counted_permille", function(c) return forward_tile.counted(c, c.tile_tokens) end,
          "products made over those of visible pairs, amid a long document" },
        { "columns",       function(c) return c.block_k end, "of a warpgroup's product" },
        { "other_columns", function(c) return c.block_k end, "the same: there is one kind" },
      },
      require = {
        { "only Hopper has wgmma", function(c) return c.wgmma <= c.hopper end },
        { "wgmma reads panels of 64 dims", function(c)
            return c.wgmma == 0 or
                   padded(c.head_dim_qk) % 64 == 0 and padded(c.head_dim_v) % 64 == 0
          end },
        { "pack divides the GQA ratio", function(c) return c.gqa % c.pack == 0 end },
        { "a warpgroup is four warps, each with 16 of its 64 rows", function(c)
            return c.wgmma == 0 or c.warps % 4 == 0 and c.warp_rows == 16
          end },
        { "a tile holds at least one query position", function(c) return c.pack <= c.rows end },
        { "the tiles fit the shared memory of a block", function(c)
            return c.shared_bytes <= c.most_shared_bytes
          end },
        { "wgmma reads queries where they lie", function(c)
            return c.wgmma == 0 or c.q_in_regs == 0
          end },
        { "a multiprocessor has the threads for min_blocks", function(c)
            return c.min_blocks * c.threads <= 1536
          end },
        { "one tile of keys needs one stage", function(c)
            return c.one_tile == 0 or c.stages == 1
          end },
        { "a strip has one tile of keys for each of queries", function(c)
            return c.strip == 1 or c.one_tile == 1
          end },
        { "a strip's tiles start at multiples of 8 keys", function(c)
            return c.strip == 1 or c.tile_tokens % 8 == 0
          end },
      },
      prefer = {
        { "wgmma has not run on a device yet", function(c) return c.wgmma == 0 end },
        { "at most an eighth of the rows idles", function(c)
            return 8 * (c.rows - c.tile_tokens * c.pack) <= c.rows
          end },
        { "the accumulators fit the registers", function(c)
            local most = c.most_registers // (c.threads * c.min_blocks)
            return c.thread_registers <= math.min(255, most)
          end },
        { "min_blocks is 1 or as many as a multiprocessor holds", function(c)
            local most = forward_tile.blocks(c, c.shared_bytes, c.thread_registers)
            return c.min_blocks == 1 or c.min_blocks == math.min(4, most)
          end },
        { "a good part of the heads that could share a tile do", function(c)
            return 5 * c.pack >= math.min(c.gqa, 16)
          end },
        { "a wide window needs no choice of odd tiles", function(c)
            return window_keys(c) < 1024 or c.block_k % 32 == 0 or c.block_k == 48
          end },
        { "a tile of keys is no wider than the window needs", function(c)
            return c.one_tile == 0 or c.block_k - 16 < window_keys(c) + c.tile_tokens - 1
          end },
        { "at most a third more is computed than the best tile of these rows would", function(c)
            local keys = window_keys(c) + c.tile_tokens - 1
            return 3 * ((keys + c.block_k - 1) // c.block_k * c.block_k) <= 4 * (keys + 15)
          end },
        { "queries that are read once need no registers", function(c)
            return c.one_tile == 0 or c.q_in_regs == 0
          end },
      },
      default = function(c)
        local best, least
        for _, knobs in ipairs(forward_tile.candidates(c)) do
          local cost = forward_tile.cost(c, knobs)
          if cost and (not least or cost < least) then best, least = knobs, cost end
        end
        return best
      end,
    },

    backward = {
      summary = "gradients of queries, and of the keys and values of their window",
      fixed = attention_facts.cuda,
      tune = {
        { "wgmma",      { 0, 1 },            "whether warpgroups multiply, with wgmma" },
        { "dq_pack",    { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32 },
                                             "query heads of one key head in a tile of dq" },
        { "dq_warps",   { 2, 4, 8 },         "warps of a block of dq" },
        { "dq_tall",    { 1, 2 },            "times 16 query rows that a warp owns" },
        { "dq_wide",    { 1, 2, 4 },            "times 16 keys that it multiplies with" },
        { "dq_keys",    { 16, 32, 64, 128 }, "keys of a step of dq" },
        { "dq_stages",  { 2, 3 },            "steps of dq in shared memory" },
        { "dq_hold",    { 0, 1 },            "whether q and dout stay in registers" },
        { "dq_blocks",  { 1, 2, 3, 4 },      "blocks of dq that a multiprocessor shall hold" },
        { "dkv_pack",   { 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32 },
                                             "query heads of one key head in a step of dkv" },
        { "dkv_warps",  { 2, 4, 8 },         "warps of a block of dkv" },
        { "dkv_tall",   { 1, 2 },            "times 16 keys that a warp owns" },
        { "dkv_wide",   { 1, 2, 4 },            "times 16 query rows that it multiplies with" },
        { "dkv_rows",   { 16, 32, 64, 128 }, "query rows of a step of dkv" },
        { "dkv_stages", { 2, 3 },            "steps of dkv in shared memory" },
        { "dkv_hold",   { 0, 1 },            "whether k and v stay in registers" },
        { "dkv_split",  { 0, 1 },            "whether one block makes dk and another dv" },
        { "dkv_blocks", { 1, 2, 3, 4 },      "blocks of dkv that a multiprocessor shall hold" },
      },
      derive = {
        { "dq_rows",    function(c) return 16 * c.dq_tall * c.dq_warps end,
          "query rows of a tile of dq" },
        { "dq_tokens",  function(c) return c.dq_rows // c.dq_pack end,
          "query positions of a tile of dq" },
        { "dkv_keys",   function(c) return 16 * c.dkv_tall * c.dkv_warps end,
          "keys of a tile of dkv" },
        { "dkv_tokens", function(c) return c.dkv_rows // c.dkv_pack end,
          "query positions of a step of dkv" },
        { "dq_shared_bytes",  function(c)
            return pair_bytes(c) * (c.dq_rows + c.dq_stages * c.dq_keys)
          end, "shared memory of a block of dq" },
        { "dkv_shared_bytes", function(c)
            return pair_bytes(c) * c.dkv_keys + (pair_bytes(c) + 8) * c.dkv_stages * c.dkv_rows
          end, "shared memory of a block of dkv" },
        { "dq_registers",     function(c)
            local qk, v = padded(c.head_dim_qk), padded(c.head_dim_v)
            return c.dq_tall * (qk // 2 + c.dq_hold * (qk + v) // 4 + 16 * c.dq_wide) + 60
          end, "registers of a thread of dq, about" },
        { "dkv_registers",    function(c)
            local qk, v = padded(c.head_dim_qk), padded(c.head_dim_v)
            local sums = c.dkv_split == 1 and math.max(qk, v) or qk + v
            return c.dkv_tall * (sums // 2 + c.dkv_hold * (qk + v) // 4 + 16 * c.dkv_wide) + 60
          end, "registers of a thread of dkv, about" },
        { "dq_counted_permille",  function(c)
            return products_permille(c, dq_pairs(c), c.dq_tokens * c.dq_pack * window_keys(c),
                                     2, 1, 0)
          end, "products made over the 3 of a visible pair that dq needs, amid a long document" },
        { "dkv_counted_permille", function(c)
            return products_permille(c, dkv_pairs(c), c.dkv_keys * c.gqa * window_keys(c),
                                     2 + c.dkv_split, 2, c.dkv_split)
          end, "products made over the 4 of a visible pair that dk and dv need" },
        { "counted_permille",     function(c)
            local dq = 2 * c.head_dim_qk + c.head_dim_v
            local dkv = 2 * (c.head_dim_qk + c.head_dim_v)
            return (dq * c.dq_counted_permille + dkv * c.dkv_counted_permille) // (dq + dkv)
          end, "products made over those 7 of each visible pair" },
        { "columns",       function(c) return 16 * c.dq_wide end,
          "of a warpgroup's product in dq" },
        { "other_columns", function(c) return 16 * c.dkv_wide end, "and in dkv" },
      },
      require = {
        { "only Hopper has wgmma", function(c) return c.wgmma <= c.hopper end },
        { "wgmma reads panels of 64 dims", function(c)
            return c.wgmma == 0 or
                   padded(c.head_dim_qk) % 64 == 0 and padded(c.head_dim_v) % 64 == 0
          end },
        { "a warpgroup is four warps, each with 16 rows of its own", function(c)
            return c.wgmma == 0 or c.dq_warps % 4 + c.dkv_warps % 4 == 0 and
                                   c.dq_tall == 1 and c.dkv_tall == 1
          end },
        { "wgmma reads a warp's own rows where they lie", function(c)
            return c.wgmma == 0 or c.dq_hold == 0 and c.dkv_hold == 0
          end },
        { "chunks of 64 are for warpgroups", function(c)
            return c.wgmma == 1 or c.dq_wide < 4 and c.dkv_wide < 4
          end },
        { "a tile's heads divide the GQA ratio", function(c)
            return c.gqa % c.dq_pack == 0 end },
        { "a tile of dq holds at least one query position", function(c)
            return c.dq_tokens >= 1 end },
        { "a step of dq is a whole number of chunks", function(c)
            return c.dq_keys % (16 * c.dq_wide) == 0 end },
        { "a block of dq fits the shared memory", function(c)
            return c.dq_shared_bytes <= c.most_shared_bytes end },
        { "a step's heads divide the GQA ratio", function(c)
            return c.gqa % c.dkv_pack == 0 end },
        { "a step of dkv holds at least one query position", function(c)
            return c.dkv_tokens >= 1 end },
        { "a step of dkv is a whole number of chunks", function(c)
            return c.dkv_rows % (16 * c.dkv_wide) == 0 end },
        { "a block of dkv fits the shared memory", function(c)
            return c.dkv_shared_bytes <= c.most_shared_bytes end },
        { "a thread has its least registers in as many blocks", function(c)
            return c.dq_blocks * c.dq_warps * 32 * 64 <= c.most_registers and
                   c.dkv_blocks * c.dkv_warps * 32 * 64 <= c.most_registers
          end },
      },
      prefer = {
        { "wgmma has not run on a device yet", function(c) return c.wgmma == 0 end },
        { "dq keeps its sums in registers", function(c)
            return c.dq_registers <= 255 and
                   c.dq_registers * 32 * c.dq_warps * c.dq_blocks <= c.most_registers
          end },
        { "q and dout stay in registers where there is room", function(c)
            local held = c.dq_tall * (padded(c.head_dim_qk) + padded(c.head_dim_v)) // 4
            return c.dq_hold == 1 or c.dq_registers + held > 255
          end },
        { "dkv keeps its sums in registers", function(c)
            return c.dkv_registers <= 255 and
                   c.dkv_registers * 32 * c.dkv_warps * c.dkv_blocks <= c.most_registers
          end },
        { "k and v stay in registers where there is room", function(c)
            local held = c.dkv_tall * (padded(c.head_dim_qk) + padded(c.head_dim_v)) // 4
            return c.dkv_hold == 1 or c.dkv_registers + held > 255
          end },
        { "the blocks of a multiprocessor fit its shared memory", function(c)
            return c.dq_blocks * (c.dq_shared_bytes + 1024) <= c.most_shared_bytes + 1024 and
                   c.dkv_blocks * (c.dkv_shared_bytes + 1024) <= c.most_shared_bytes + 1024
          end },
        { "a multiprocessor has at least eight warps of dq", function(c)
            return c.dq_blocks * c.dq_warps >= 8 or
                   c.dq_registers * 32 * c.dq_warps * (c.dq_blocks + 1) > c.most_registers
          end },
        { "and eight of dkv", function(c)
            return c.dkv_blocks * c.dkv_warps >= 8 or
                   c.dkv_registers * 32 * c.dkv_warps * (c.dkv_blocks + 1) > c.most_registers
          end },
        { "two steps hide a load, multiplied by sixteens", function(c)
            return c.dq_stages == 2 and c.dkv_stages == 2 and c.dq_wide == 1 and c.dkv_wide == 1
          end },
        { "all rows of dq but an eighth hold a query, and so do all of dkv", function(c)
            return 8 * (c.dq_rows - c.dq_tokens * c.dq_pack) <= c.dq_rows and
                   c.dkv_rows == c.dkv_tokens * c.dkv_pack
          end },
        { "heads share tiles as far as they can, or not at all", function(c)
            return (c.dq_pack == 1 or c.dq_pack == most_heads(c, c.dq_rows, 8)) and
                   (c.dkv_pack == 1 or c.dkv_pack == most_heads(c, c.dkv_rows, c.dkv_rows))
          end },
        { "dk and dv come from one block where it can hold them", function(c)
            return c.dkv_split == 0 or c.head_dim_qk + c.head_dim_v > 320
          end },
        { "at most a third more is computed than visible pairs need", function(c)
            return window_keys(c) < 96 or c.counted_permille <= 1333
          end },
      },
      default = function(c)
        local dims = padded(c.head_dim_qk) + padded(c.head_dim_v)
        local narrow = window_keys(c) <= 256
        -- the most heads that fill a tile's rows; of a step of dkv, exactly
        local dq_pack, dkv_pack = 1, 1
        for _, heads in ipairs { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 } do
          if c.gqa % heads == 0 then
            dq_pack = heads
            if 16 % heads == 0 and dims <= 256 then dkv_pack = heads end   -- else for registers
          end
        end
        local step = dims <= 160 and 64 or dims <= 256 and 32 or 16
        local tall = dims <= 160 and (dq_pack >= 4 or not narrow) and 2 or 1
        local dq_warps, dkv_warps = 4, narrow and 4 or dims <= 160 and 8 or 4
        while pair_bytes(c) * (16 * tall * dq_warps + 2 * step) > c.most_shared_bytes do
          dq_warps = dq_warps // 2
        end
        while pair_bytes(c) * (16 * dkv_warps + 2 * step) + 16 * step > c.most_shared_bytes do
          dkv_warps = dkv_warps // 2
        end
        return { wgmma = 0, dq_pack = dq_pack, dq_warps = dq_warps, dq_tall = tall, dq_wide = 1,
                 dq_keys = step, dq_stages = 2, dq_hold = dims <= 256 and 1 or 0, dq_blocks = 1,
                 dkv_pack = dkv_pack, dkv_warps = dkv_warps, dkv_tall = 1, dkv_wide = 1,
                 dkv_rows = step, dkv_stages = 2, dkv_hold = dims <= 160 and 1 or 0,
                 dkv_split = dims > 352 and 1 or 0, dkv_blocks = 1 }
      end,
    },

    copies = {
      summary = "keys into messages, gaps filled, sums made wide again, heads' values combined",
      fixed = { "head_dim_qk", "head_dim_v", "left_limited", "window_left", "right_limited",
                "window_right", "f16" },
      tune = {},
      derive = { { "wgmma", function() return 0 end, "nothing is multiplied" } },
      require = {},
      prefer = {},
      default = function() return {} end,
    },
  },
}
