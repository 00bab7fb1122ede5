-- SPDX-License-Identifier: Apache-2.0
-- The policy for loads that the proxy does not count itself: open conversations, and tokens.
--
-- The homes (and the sizes) live in stick tables, so they are shared with other routers and outlive a reload; here are
-- only sums. An action adds what it decides to the sums at once; a task counts the tables anew, which brings in what other
-- routers decided, what expired, and requests that failed. With an engine's metric the sums are the metric instead.
--
-- For requests in flight the configuration decides alone, and of this only await_home is used (with --router).

local options = os.getenv("TIDEPOOL_ROUTER") or error("TIDEPOOL_ROUTER is not set: load this from a configuration made by router/generate")
local load_kind, hundredths, sync_ms, source, metric, factor, explain, node_list = table.unpack((function()
  local words = {}
  for word in options:gmatch("%S+") do words[#words + 1] = word end
  return words
end)())
explain = explain == "explain"
hundredths, sync_ms, factor = tonumber(hundredths), tonumber(sync_ms), tonumber(factor)

local nodes, by_id, by_name = {}, {}, {}
for name, id, address in node_list:gmatch("([^,=]+)=(%d+)=([^,]+)") do
  local node = {name = name, id = tonumber(id), address = address, load = 0}
  nodes[#nodes + 1], by_id[node.id], by_name[name] = node, node, node
end

local SYNC_SHARE = 20           -- counting may take 1/20 of one thread's time
local USABLE_FOR = 0.02         -- seconds; states of nodes are asked again after this
local LEARNING_TIME = 2         -- seconds from the worker's start in which homes may still arrive from the one before
local next_tie = 0
local usable_at = -1

local function now()
  local t = core.now()
  return t.sec + t.usec / 1e6
end

local started = math.huge
core.register_init(function() started = now() end)

-- A conversation without a home may be one that the former worker knows: wait until it has told, while it may.
core.register_action("await_home", {"http-req"}, function(txn)
  local table_name = load_kind == "requests" and "nodes" or "homes"
  while now() - started < LEARNING_TIME do
    local entry = core.backends[table_name].stktable:lookup(txn:get_var("txn.key"))
    if entry and (entry.server_id or entry.gpt0 or 0) ~= 0 then return end
    core.msleep(20)
  end
end, 0)

-- The same two questions as the configuration asks for requests in flight. The name stands alone on purpose: of
-- "backend/server" the proxy overwrites the slash inside Lua's own copy of the string, and the next call finds no server.
local function refresh_usable(txn)
  local t = now()
  if t - usable_at < USABLE_FOR and t >= usable_at then return end
  usable_at = t
  for _, node in ipairs(nodes) do
    local up = txn.f:srv_is_up(node.name)
    node.up = up == true or up == 1
    node.usable = node.up and (tonumber(txn.f:srv_weight(node.name)) or 0) > 0
  end
end

-- Equally loaded nodes take turns.
local function least_loaded(except)
  local best, n = nil, #nodes
  next_tie = next_tie % n + 1
  for i = 0, n - 1 do
    local node = nodes[(next_tie + i - 1) % n + 1]
    if node.usable and node ~= except and (not best or node.load < best.load) then best = node end
  end
  return best
end

local function is_over(load, total, count)
  return load * count * 100 > hundredths * total
end

local function decide(home_id, held, weight, keyed)
  if not keyed then return "unkeyed", least_loaded() end
  if home_id == 0 then return "new", least_loaded() end
  local home = by_id[home_id]
  if not home or not home.up then return "rehomed", least_loaded() end
  local total, count = 0, 0
  for _, node in ipairs(nodes) do
    if node.usable then total, count = total + node.load, count + 1 end
  end
  if not is_over(home.load, total, count) then return "stay", home end
  local best = least_loaded(home)
  local after = total + weight - (home.usable and held or 0)
  if not best or is_over(best.load + weight, after, count) then return "guarded", home end
  return "moved", best
end

core.register_action("route", {"http-req"}, function(txn)
  refresh_usable(txn)
  local keyed = txn:get_var("txn.key") ~= nil
  local home_id = txn:get_var("txn.home") or 0
  local held, weight = 0, 1
  if load_kind == "tokens" then
    held = txn:get_var("txn.held") or 0
    weight = tonumber(txn:get_var("txn.size")) or 0
    if source ~= "header" then weight = math.ceil(weight / (source == "bytes" and factor or 4)) end
    weight = math.max(1, math.min(math.floor(weight), 4294967295))
  elseif home_id ~= 0 then
    held = 1
  end
  local home = by_id[home_id]
  if explain then
    local loads = {}
    for i, node in ipairs(nodes) do loads[i] = string.format("%s=%d", node.name, node.load) end
    txn:set_var("txn.loads", table.concat(loads, " "))
  end
  local decision, node = decide(home_id, held, weight, keyed)
  txn:set_var("txn.decision", decision)
  txn:set_var("txn.weight", weight)
  txn:set_var("txn.held", held)
  if not node then return end
  txn:set_var("txn.node", node.name)
  txn:set_var("txn.node_id", node.id)
  if not keyed and source ~= "metric" then return end
  if source ~= "metric" and home then home.load = math.max(0, home.load - held) end
  node.load = node.load + weight
end, 0)

core.register_fetches("node_load", function(txn, name)
  local node = by_name[name]
  return node and string.format("%d", node.load) or "0"
end)

local function count_tables()
  local homes = core.backends["homes"].stktable:dump()
  local sizes = load_kind == "tokens" and core.backends["sizes"].stktable:dump()
  local sums = {}
  for key, entry in pairs(homes) do
    local id = entry.gpt0
    if id and id ~= 0 then
      local size = sizes and sizes[key] and sizes[key].gpt0 or (sizes and 0 or 1)
      sums[id] = (sums[id] or 0) + size
    end
  end
  for _, node in ipairs(nodes) do node.load = sums[node.id] or 0 end
end

local function keep_counting()
  local early = 50              -- after a reload the tables arrive from the old process: look often at first
  while true do
    local start = os.clock()
    count_tables()
    local took_ms = math.ceil((os.clock() - start) * 1000)
    local wait_ms = early > 0 and math.min(sync_ms, 100) or sync_ms
    early = early - 1
    core.msleep(math.max(wait_ms, took_ms * SYNC_SHARE))
  end
end

-- The sum over the lines of that name: an engine has one for each of its models or ranks.
local function metric_in(text)
  local sum, found = 0, false
  for line in text:gmatch("[^\n]+") do
    local name, value = line:match("^([%w_:]+)%b{}%s+(%S+)")
    if not name then name, value = line:match("^([%w_:]+)%s+(%S+)") end
    if name == metric and tonumber(value) then sum, found = sum + tonumber(value), true end
  end
  return found and sum * factor or nil
end

local function keep_asking(node)
  local url, complained = "http://" .. node.address .. "/metrics", false
  while true do
    local answer = core.httpclient():get{url = url, timeout = 2000}
    local value = answer and answer.status == 200 and answer.body and metric_in(answer.body)
    if value then
      node.load, complained = math.floor(value + 0.5), false
    else
      -- Unknown is neither idle nor full: the mean of the others.
      local sum, count = 0, 0
      for _, other in ipairs(nodes) do
        if other ~= node and other.usable then sum, count = sum + other.load, count + 1 end
      end
      if count > 0 then node.load = sum // count end
      if not complained then
        core.Warning(string.format("node %s: no metric %s at %s (status %s); its load is taken as the others' mean. Check --tokens metric:NAME",
                                   node.name, metric, url, tostring(answer and answer.status)))
        complained = true
      end
    end
    core.msleep(sync_ms)
  end
end

if load_kind == "requests" then return end

if source == "metric" then
  for _, node in ipairs(nodes) do core.register_task(function() keep_asking(node) end) end
else
  core.register_task(keep_counting)
end
