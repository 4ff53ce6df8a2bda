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
      },
      derive = {
      },
      require = {
      },
      prefer = {
      },
      default = function(c) return {} end,
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
