"""`plugsft plan`: memory and step time, forecast without weights."""
