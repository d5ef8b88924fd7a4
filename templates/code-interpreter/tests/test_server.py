"""The server, with an interpreter that does what the tests say."""

import asyncio
import importlib.util
import json
import unittest

import support  # noqa: F401, puts the modules on the path

HAS = all(importlib.util.find_spec(name) for name in ("tornado", "jupyter_client"))
if HAS:
    import tornado.httpclient
    import tornado.httpserver
    import tornado.netutil

    import server
    from contexts import Context, Died, Refused, counted, result, said

    class Scripted(Context):
        """Its programs: `say WORD`, `die`, `wait`, `silence`, `break`."""

        starts = 0

        async def start(self):
            if self.cwd == "/no/such/place":
                raise Refused("no such place")
            self.starts += 1
            self.waiting = None
            self.interrupts = 0

        async def stop(self):
            pass

        async def interrupt(self):
            self.interrupts += 1
            self.abandon(None)

        def abandon(self, error):
            if self.waiting and not self.waiting.done():
                self.waiting.set_exception(error) if error else self.waiting.set_result(None)

        async def execute(self, code, env, tell):
            word, _, rest = code.partition(" ")
            if word == "silence":
                self.waiting = asyncio.get_running_loop().create_future()
                return await self.waiting
            tell(counted(1))
            if word == "say":
                tell(said("stdout", rest + "".join(env.values())))
                tell(result({"text/plain": repr(rest)}, True))
            elif word == "wait":
                tell(said("stdout", "waiting"))
                self.waiting = asyncio.get_running_loop().create_future()
                await self.waiting
            elif word == "die":
                raise Died("it died")
            elif word == "break":
                raise KeyError("oops")


@unittest.skipUnless(HAS, "tornado and jupyter_client are not both here")
class ServerTest(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.registry = server.Registry({"python": Scripted, "javascript": Scripted})
        self.http = tornado.httpserver.HTTPServer(server.application(self.registry))
        sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
        self.port = sockets[0].getsockname()[1]
        self.http.add_sockets(sockets)
        self.client = tornado.httpclient.AsyncHTTPClient(force_instance=True)

    async def asyncTearDown(self):
        self.client.close()
        self.http.stop()
        await self.http.close_all_connections()

    async def ask(self, method, path, body=None):
        body = json.dumps(body) if body is not None else ("" if method == "POST" else None)
        url = f"http://127.0.0.1:{self.port}{path}"
        return await self.client.fetch(url, method=method, body=body, raise_error=False)

    async def execute(self, code, **more):
        answer = await self.ask("POST", "/execute", {"code": code, **more})
        self.assertEqual(answer.code, 200, answer.body)
        return [json.loads(line) for line in answer.body.decode().splitlines()]

    async def test_a_stream(self):
        lines = await self.execute("say hello", env_vars={"A": "!"})
        kinds = [line["type"] for line in lines]
        self.assertEqual(kinds, ["number_of_executions", "stdout", "result", "end_of_execution"])
        self.assertEqual((lines[1]["text"], lines[2]["text"]), ("hello!", "hello"))
        self.assertIn("timestamp", lines[1])

    async def test_contexts(self):
        self.assertEqual((await self.ask("GET", "/health")).body, b"OK")
        made = json.loads((await self.ask("POST", "/contexts", {"language": "JS", "cwd": "/tmp"})).body)
        self.assertEqual((made["language"], made["cwd"]), ("javascript", "/tmp"))
        self.assertEqual(json.loads((await self.ask("GET", "/contexts")).body), [made])
        self.assertEqual((await self.execute("say x", context_id=made["id"]))[2]["text"], "x")
        self.assertEqual((await self.ask("POST", f"/contexts/{made['id']}/restart")).code, 200)
        self.assertEqual(self.registry.contexts[made["id"]].starts, 2)
        self.assertEqual((await self.ask("DELETE", f"/contexts/{made['id']}")).code, 200)
        self.assertEqual(json.loads((await self.ask("GET", "/contexts")).body), [])

    async def test_the_default_of_a_language_is_one(self):
        await asyncio.gather(*(self.execute("say x") for _ in range(3)), self.execute("say y", language="py"))
        self.assertEqual([context.language for context in self.registry.contexts.values()], ["python"])
        (context,) = self.registry.contexts.values()
        await self.ask("DELETE", f"/contexts/{context.id}")
        await self.execute("say x")
        self.assertEqual(len(self.registry.contexts), 1)

    async def test_refusals(self):
        for body, status, words in [
            ({"code": "x", "context_id": "a", "language": "python"}, 400, "Only one of"),
            ({"code": "x", "context_id": "a"}, 404, "Context a not found"),
            ({"code": "x", "language": "cobol"}, 400, "no interpreter for cobol"),
            ({"code": 1}, 400, "code must be a string"),
            ({"code": "x", "env_vars": {"A": 1}}, 400, "env_vars"),
            ([], 400, "not a JSON object"),
        ]:
            answer = await self.ask("POST", "/execute", body)
            self.assertEqual(answer.code, status)
            self.assertIn(words, answer.body.decode())
        for path, method in [("/contexts/a", "DELETE"), ("/contexts/a%25s/restart", "POST")]:
            self.assertEqual((await self.ask(method, path)).code, 404)
        answer = await self.ask("POST", "/contexts", {"cwd": "/no/such/place"})
        self.assertEqual((answer.code, answer.body), (400, b"no such place"))

    async def test_what_breaks_is_told(self):
        lines = await self.execute("die")
        self.assertEqual([line["type"] for line in lines][1:], ["error", "end_of_execution"])
        self.assertEqual((lines[1]["name"], lines[1]["value"]), ("ContextEnded", "it died"))
        (context,) = self.registry.contexts.values()
        self.assertEqual(context.starts, 2)
        self.assertEqual((await self.execute("break"))[1]["name"], "KeyError")

    async def test_who_hangs_up_interrupts(self):
        await self.execute("say x")
        (context,) = self.registry.contexts.values()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"code": "wait"}).encode()
        writer.write(b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await reader.readuntil(b"waiting")
        # The next one waits for its turn, and gets it.
        next_one = asyncio.ensure_future(self.execute("say after"))
        writer.close()
        self.assertEqual((await next_one)[2]["text"], "after")
        self.assertEqual(context.interrupts, 1)

    async def test_an_answer_begins_before_there_is_anything_to_tell(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"code": "silence"}).encode()
        writer.write(b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        self.assertIn(b" 200 ", await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def test_who_waits_is_told_that_all_is_well(self):
        every, server.KEEPALIVE_SECONDS = server.KEEPALIVE_SECONDS, 0.01
        self.addCleanup(setattr, server, "KEEPALIVE_SECONDS", every)
        waiting = asyncio.ensure_future(self.execute("wait"))
        await self.execute_until_waiting()
        (context,) = self.registry.contexts.values()
        await asyncio.sleep(0.05)
        context.abandon(None)
        self.assertIn("keepalive", [line["type"] for line in await waiting])

    async def execute_until_waiting(self):
        while not any(context.waiting for context in self.registry.contexts.values()):
            await asyncio.sleep(0.01)

    async def test_a_restart_ends_what_runs(self):
        waiting = asyncio.ensure_future(self.execute("wait"))
        await self.execute_until_waiting()
        (context,) = self.registry.contexts.values()
        await self.ask("POST", f"/contexts/{context.id}/restart")
        self.assertEqual((await waiting)[-2]["value"], "The context was restarted")


if __name__ == "__main__":
    unittest.main()
